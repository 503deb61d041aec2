"""Whole conversations out of the tables and into them, each in one transaction."""

import json
import time
from collections.abc import Collection

import msgspec

from localpaged.store.conversations import Conversations
from localpaged.store.message import Conversation, Message, pack_token_ids
from localpaged.store.rows import message_of
from localpaged.store.transcript import ABSENT, Transcript, TranscriptMessage, TranscriptTimings, stored_json

COLUMNS = (
    "id, conversation, parent, role, text, state, created, token_ids, num_kept_tokens, candidate, chosen_child, model,"
    " sampling, finish_reason, error, timings"
)
MAX_TITLE_CHARS = 300


def conversation_ids(chats: Conversations) -> list[int]:
    """Every conversation that is not deleted, oldest first."""
    rows = chats.database.rows(
        f"SELECT id FROM conversations WHERE deleted IS NULL AND {chats.mine} ORDER BY id", {"owner": chats.owner}
    )
    return [row["id"] for row in rows]


def messages_of(chats: Conversations, conversation_id: int) -> list[Message]:
    """Every message of a conversation's tree: each behind its parent, siblings oldest first."""
    chats.get(conversation_id)
    rows = chats.database.rows("SELECT * FROM messages WHERE conversation = ? ORDER BY id", [conversation_id])
    return [message_of(row) for row in rows]


def read_transcript(chats: Conversations, conversation_id: int) -> Transcript:
    """A whole conversation. What is being written is in it as interrupted, with the text that it has."""
    return _transcript(chats.get(conversation_id), messages_of(chats, conversation_id))


def write_transcript(chats: Conversations, transcript: Transcript) -> int:
    """Add a conversation, all or nothing; its id. The transcript must be one that check() passes."""
    row = {
        "title": transcript.title,
        "system_prompt": transcript.system_prompt,
        "settings": bytes(transcript.settings).decode(),
        "pinned": transcript.pinned,
        "kv_pinned": transcript.kv_pinned,
        "archived": transcript.archived,
        "created": transcript.created,
        "updated": transcript.updated,
    }
    with chats.database.transaction() as connection:
        # A message may have chosen one that comes after it.
        connection.execute("PRAGMA defer_foreign_keys=ON")
        conversation_id = chats.insert(connection, row)
        (last,) = connection.execute(
            "SELECT max((SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'messages'),"
            " (SELECT coalesce(max(id), 0) FROM messages))"
        ).fetchone()
        ids = {message.id: last + place for place, message in enumerate(transcript.messages, 1)}
        connection.executemany(
            f"INSERT INTO messages ({COLUMNS}) VALUES ({', '.join('?' * len(COLUMNS.split(',')))})",
            (
                (
                    ids[message.id],
                    conversation_id,
                    None if message.parent is None else ids[message.parent],
                    message.role,
                    message.text,
                    message.state,
                    message.created,
                    message.token_ids,
                    message.num_kept_tokens,
                    message.candidate,
                    None if message.chosen_child is None else ids[message.chosen_child],
                    message.model,
                    None if message.sampling is ABSENT else bytes(message.sampling).decode(),
                    message.finish_reason,
                    message.error,
                    msgspec.json.encode(message.timings).decode() if message.timings else None,
                )
                for message in transcript.messages
            ),
        )
        if transcript.chosen_root is not None:
            connection.execute(
                "UPDATE conversations SET chosen_root = ? WHERE id = ?", (ids[transcript.chosen_root], conversation_id)
            )
    return conversation_id


def duplicate(chats: Conversations, conversation_id: int, title: str | None = None) -> Conversation:
    """A second conversation with everything that a first one has, token ids too."""
    return _added(chats, read_transcript(chats, conversation_id), title)


def branch_off(chats: Conversations, message_id: int, title: str | None = None) -> Conversation:
    """A new conversation of the messages from the root to this one, with their token ids."""
    message = chats.message(message_id)
    path = chats.path_to(message_id)
    for one, below in zip(path, [*path[1:], None], strict=True):
        one.chosen_child = below.id if below else None
    conversation = chats.get(message.conversation)
    conversation.chosen_root = path[0].id
    return _added(chats, _transcript(conversation, path), title)


def _added(chats: Conversations, transcript: Transcript, title: str | None) -> Conversation:
    if title is None and transcript.title:
        title = transcript.title[: MAX_TITLE_CHARS - 7] + " (copy)"
    transcript.title = title or ""
    transcript.pinned = transcript.kv_pinned = transcript.archived = False
    transcript.created = transcript.updated = time.time()
    return chats.get(write_transcript(chats, transcript))


def _transcript(conversation: Conversation, messages: Collection[Message]) -> Transcript:
    numbers = {message.id: number for number, message in enumerate(messages, 1)}
    return Transcript(
        title=conversation.title,
        system_prompt=conversation.system_prompt,
        settings=stored_json(json.dumps(conversation.settings), "settings"),
        pinned=conversation.pinned,
        kv_pinned=conversation.kv_pinned,
        archived=conversation.archived,
        created=conversation.created,
        updated=conversation.updated,
        chosen_root=numbers.get(conversation.chosen_root or 0),
        messages=[_transcript_message(message, numbers) for message in messages],
    )


def _transcript_message(message: Message, numbers: dict[int, int]) -> TranscriptMessage:
    sampling, timings = message.sampling, message.timings
    return TranscriptMessage(
        id=numbers[message.id],
        parent=None if message.parent is None else numbers[message.parent],
        role=message.role,
        text=message.text,
        state="interrupted" if message.state == "running" else message.state,
        created=message.created,
        token_ids=pack_token_ids(message.token_ids),
        num_kept_tokens=message.num_kept_tokens,
        candidate=message.candidate,
        chosen_child=numbers.get(message.chosen_child or 0),
        model=message.model,
        sampling=ABSENT if sampling is None else stored_json(json.dumps(sampling), "sampling"),
        finish_reason=message.finish_reason,
        error=message.error,
        timings=None if timings is None else TranscriptTimings(**msgspec.structs.asdict(timings)),
    )
