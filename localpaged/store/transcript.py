"""A conversation with all of its messages, as it leaves the store and comes into it: lossless, without ids of a store.

Its fields are those of the JSON that is exported. Knows nothing of tables, files or other programs' formats.
"""

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localpaged.errors import InvalidRequestError
from localpaged.store.message import Role, Timings

LATEST = 253_402_300_799  # the year 9999
Moment = Annotated[float, Meta(ge=0, le=LATEST)]
Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
EMPTY = msgspec.Raw(b"{}")
ABSENT = msgspec.Raw(b"null")

# A surrogate that has no other half; a pair, or any other escape, is left as it is.
HALVES = re.compile(rb"\\(?:u[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[dD][89a-fA-F][0-9a-fA-F]{2}|.)")


class TranscriptTimings(Timings, kw_only=True, forbid_unknown_fields=True):
    """The store's, without room for what it does not know."""


class TranscriptMessage(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One message. id: its number within the transcript; parent and chosen_child are such numbers too.

    token_ids: little-endian, four bytes each (base64 in JSON). sampling: a JSON object as it is stored, or ABSENT.
    """

    id: Count
    parent: Count | None
    role: Role
    text: str
    state: Literal["complete", "interrupted", "error"]
    created: Moment
    token_ids: bytes = b""
    num_kept_tokens: Count | None = None
    candidate: Count | None = None
    chosen_child: Count | None = None
    model: str | None = None
    sampling: msgspec.Raw = ABSENT
    finish_reason: str | None = None
    error: str | None = None
    timings: TranscriptTimings | None = None


class Transcript(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A whole conversation: each message behind its parent, siblings in their order. settings: a JSON object."""

    title: str = ""
    system_prompt: str = ""
    settings: msgspec.Raw = EMPTY
    pinned: bool = False
    kv_pinned: bool = False
    archived: bool = False
    created: Moment
    updated: Moment
    chosen_root: Count | None = None
    messages: list[TranscriptMessage]

    def check(self, where: str) -> None:
        """Raise InvalidRequestError, which says where, unless the messages are a tree and every choice is in it."""
        parents: dict[int, int | None] = {}
        for place, message in enumerate(self.messages):
            at = f"{where}.messages[{place}]"
            if message.id in parents:
                raise InvalidRequestError(f"{at}.id: {message.id} is the id of an earlier message too.", "body")
            if message.parent is not None and message.parent not in parents:
                raise InvalidRequestError(f"{at}.parent: {message.parent} is no message before this one.", "body")
            if len(message.token_ids) % 4:
                raise InvalidRequestError(f"{at}.token_ids: not four bytes for each token.", "body")
            parents[message.id] = message.parent
            # An absent one is left out of what is written by its identity.
            absent = bytes(message.sampling) == b"null"
            message.sampling = ABSENT if absent else stored_json(message.sampling, f"{at}.sampling")
        self.settings = stored_json(self.settings, f"{where}.settings")
        for place, message in enumerate(self.messages):
            child = message.chosen_child
            if child is not None and parents.get(child, message) != message.id:
                at = f"{where}.messages[{place}].chosen_child"
                raise InvalidRequestError(f"{at}: message {child} is not under message {message.id}.", "body")
        if self.chosen_root is not None and parents.get(self.chosen_root, self) is not None:
            raise InvalidRequestError(f"{where}.chosen_root: message {self.chosen_root} is no first message.", "body")


def stored_json(raw: msgspec.Raw | bytes | str, where: str) -> msgspec.Raw:
    """A JSON object as the store writes it. Raises InvalidRequestError for anything else."""
    text = raw if isinstance(raw, str) else bytes(raw)
    try:
        value: Any = json.loads(text, parse_constant=lambda _: None)
        if isinstance(value, dict):
            return msgspec.Raw(with_whole_characters(json.dumps(value).encode()))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{where} cannot be read: {error}.", "body") from error
    raise InvalidRequestError(f"{where} is no JSON object.", "body")


def with_whole_characters(data: bytes) -> bytes:
    """JSON text in which half a character that stands alone is U+FFFD."""
    # Only such a half takes six bytes: pairs take twelve, other escapes two.
    return HALVES.sub(lambda match: rb"\ufffd" if len(match[0]) == 6 else match[0], data)
