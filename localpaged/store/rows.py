"""Rows of the tables as values, and words as a query of the full-text index."""

import json
from typing import Any

import msgspec

from localpaged.store.message import Conversation, Message, Timings, unpack_token_ids


def fts_query(query: str) -> str | None:
    """Each word as a quoted term, the last one as a prefix. None when there is no word."""
    # SQLite takes a NUL for the end of the query.
    query = query.replace("\0", " ")
    words = ['"' + word.replace('"', '""') + '"' for word in query.split() if any(map(str.isalnum, word))]
    return " ".join(words) + "*" if words else None


def conversation_of(row: dict[str, Any]) -> Conversation:
    return Conversation(
        id=row["id"],
        title=row["title"],
        system_prompt=row["system_prompt"],
        settings=json.loads(row["settings"]),
        pinned=bool(row["pinned"]),
        kv_pinned=bool(row["kv_pinned"]),
        archived=bool(row["archived"]),
        chosen_root=row["chosen_root"],
        created=row["created"],
        updated=row["updated"],
    )


def message_of(row: dict[str, Any]) -> Message:
    return Message(
        id=row["id"],
        conversation=row["conversation"],
        parent=row["parent"],
        role=row["role"],
        text=row["text"],
        state=row["state"],
        token_ids=unpack_token_ids(row["token_ids"]),
        num_kept_tokens=row["num_kept_tokens"],
        candidate=row["candidate"],
        chosen_child=row["chosen_child"],
        model=row["model"],
        sampling=json.loads(row["sampling"]) if row["sampling"] else None,
        finish_reason=row["finish_reason"],
        error=row["error"],
        timings=msgspec.json.decode(row["timings"], type=Timings) if row["timings"] else None,
        created=row["created"],
    )
