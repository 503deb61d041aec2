"""Messages found by their words, in every branch, page by page. Source: https://sqlite.org/fts5.html."""

from typing import Any

import msgspec

from localpaged.errors import InvalidRequestError
from localpaged.store.conversations import Conversations
from localpaged.store.message import Role
from localpaged.store.rows import fts_query


class MessageHit(msgspec.Struct, kw_only=True):
    """A message that matches; snippet marks what did with U+0002 and U+0003."""

    message: int
    conversation: int
    title: str
    role: Role
    created: float
    snippet: str


def search_messages(
    chats: Conversations, query: str, limit: int, before: int | None = None, conversation_id: int | None = None
) -> list[MessageHit]:
    """The latest `limit` messages with every word of the query, the last one as a beginning.

    before: only those older than this message; conversation_id: only those of one conversation.
    Raises InvalidRequestError for a query without words.
    """
    match = fts_query(query)
    if match is None:
        raise InvalidRequestError("The query has no word to look for. Give at least one.", "query")
    conditions = ["messages_fts MATCH :match", "deleted IS NULL", chats.mine]
    values: dict[str, Any] = {"match": match, "limit": limit, "owner": chats.owner}
    # Conditions of their own, so that the index is read from there and no further.
    if before is not None:
        conditions.append("messages_fts.rowid < :before")
        values["before"] = before
    if conversation_id is not None:
        conditions.append("messages.conversation = :conversation")
        values["conversation"] = chats.get(conversation_id).id
    rows = chats.database.rows(
        f"""
        SELECT messages.id AS message, conversation, title, role, messages.created AS created,
               snippet(messages_fts, 0, char(2), char(3), '…', 16) AS snippet
        FROM messages_fts
        JOIN messages ON messages.id = messages_fts.rowid
        JOIN conversations ON conversations.id = messages.conversation
        WHERE {" AND ".join(conditions)} ORDER BY messages_fts.rowid DESC LIMIT :limit
        """,
        values,
    )
    return [MessageHit(**row) for row in rows]
