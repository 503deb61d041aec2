"""The list of conversations: all of them, or those whose titles or messages match. Source: https://sqlite.org/fts5.html."""

from localpaged.store.conversations import Conversations
from localpaged.store.message import MessageSnippet, SearchHit
from localpaged.store.rows import conversation_of, fts_query

SHOWN_HITS = 3  # messages of a conversation that a search shows


def search_conversations(chats: Conversations, query: str = "", limit: int = 500) -> list[SearchHit]:
    """The pinned ones first, then the latest used, the archived ones last; with a query those that match it.

    A query is looked for in titles and in messages, on every branch.
    """
    order = "archived, pinned DESC, updated DESC, conversations.id DESC"
    match = fts_query(query)
    if match is None:
        rows = chats.database.rows(
            f"SELECT * FROM conversations WHERE deleted IS NULL AND {chats.mine} ORDER BY {order} LIMIT :limit",
            {"limit": limit, "owner": chats.owner},
        )
        return [SearchHit(conversation=conversation_of(row)) for row in rows]
    rows = chats.database.rows(
        f"""
        WITH hits AS (
            SELECT rowid AS conversation, NULL AS message, highlight(conversations_fts, 0, char(2), char(3)) AS part
            FROM conversations_fts WHERE conversations_fts MATCH :match
            UNION ALL
            SELECT messages.conversation, messages.id, snippet(messages_fts, 0, char(2), char(3), '…', 16)
            FROM messages_fts JOIN messages ON messages.id = messages_fts.rowid
            WHERE messages_fts MATCH :match
        ), ranked AS (
            SELECT *, row_number() OVER latest AS place, count(message) OVER whole AS num_hits
            FROM hits
            WINDOW latest AS (PARTITION BY conversation, message IS NULL ORDER BY message DESC),
                   whole AS (PARTITION BY conversation)
        )
        SELECT conversations.*, message, part, num_hits FROM ranked
        JOIN conversations ON conversations.id = ranked.conversation
        WHERE place <= {SHOWN_HITS} AND deleted IS NULL AND {chats.mine}
        ORDER BY {order}, message DESC
        """,
        {"match": match, "owner": chats.owner},
    )
    found: dict[int, SearchHit] = {}
    for row in rows:
        if row["id"] not in found and len(found) == limit:
            break
        hit = found.setdefault(row["id"], SearchHit(conversation=conversation_of(row), num_hits=row["num_hits"]))
        if row["message"] is None:
            hit.marked_title = row["part"]
        else:
            hit.hits.append(MessageSnippet(message=row["message"], snippet=row["part"]))
    return list(found.values())
