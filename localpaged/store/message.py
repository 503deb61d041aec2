"""What the store holds: a conversation and its messages, as plain values."""

import sys
from array import array
from typing import Any, Literal

import msgspec

from localpaged.errors import InvalidRequestError

Role = Literal["user", "assistant"]
State = Literal["complete", "running", "interrupted", "error"]


class NotFoundError(InvalidRequestError):
    """A conversation or message that is not there."""

    code = "not_found"


class Timings(msgspec.Struct, kw_only=True):
    """How an answer came to be. Seconds, tokens a second, tokens, blocks. None: not known."""

    ttft_s: float | None = None
    tokens_per_s: float | None = None
    num_tokens: int | None = 0
    num_cached_tokens: int | None = None
    num_computed_tokens: int | None = None
    num_shared_blocks: int = 0
    num_own_blocks: int = 0


class Message(msgspec.Struct, kw_only=True):
    """One node of a conversation's tree.

    token_ids is the exact span the message added to its branch; the branch's ids are
    those before it cut to num_kept_tokens (None: all of them), then token_ids.
    """

    id: int
    conversation: int
    parent: int | None
    role: Role
    text: str
    state: State = "complete"
    token_ids: list[int] = []
    num_kept_tokens: int | None = None
    candidate: int | None = None
    chosen_child: int | None = None
    model: str | None = None
    sampling: dict[str, Any] | None = None
    finish_reason: str | None = None
    error: str | None = None
    timings: Timings | None = None
    created: float = 0.0


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation without its messages. An empty title means that none was given yet.

    pinned: stands at the top of the list; its KV is pinned too. kv_pinned: its KV is, wherever it stands.
    archived: stands below all others, until a message is written in it.
    """

    id: int
    title: str = ""
    system_prompt: str = ""
    settings: dict[str, Any] = {}
    pinned: bool = False
    kv_pinned: bool = False
    archived: bool = False
    chosen_root: int | None = None
    created: float = 0.0
    updated: float = 0.0


class MessageSnippet(msgspec.Struct, kw_only=True):
    """The part of a message that matches, with marks around what does."""

    message: int
    snippet: str


class SearchHit(msgspec.Struct, kw_only=True):
    """A conversation in the list. What matched a search is marked with U+0002 and U+0003.

    marked_title: where the title matches; hits: the latest of its num_hits messages that match;
    snippet: the first of these, or else the title.
    """

    conversation: Conversation
    marked_title: str | None = None
    hits: list[MessageSnippet] = []
    num_hits: int = 0

    @property
    def snippet(self) -> str | None:
        return self.hits[0].snippet if self.hits else self.marked_title


class Turn(msgspec.Struct, kw_only=True):
    """A message on the shown branch, and the ids of all that share its parent, itself too, oldest first."""

    message: Message
    sibling_ids: list[int]


class Branch(msgspec.Struct, kw_only=True):
    """The shown path of a conversation; open_candidates are answers among which none is chosen yet."""

    turns: list[Turn]
    open_candidates: list[Message]
    num_earlier: int = 0


def pack_token_ids(token_ids: list[int]) -> bytes:
    """Little-endian, four bytes a token."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(blob: bytes) -> list[int]:
    packed = array("I")
    packed.frombytes(blob)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
