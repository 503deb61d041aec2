"""What the native API answers, for the OpenAPI document: fields and errors, declared beside the routes.

Nothing is checked against these when it is sent; tests compare them with real answers.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from localpaged.store.message import Role, State


class Answer(BaseModel):
    """An object with exactly these fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """code is stable; param names the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Answer):
    error: ErrorDetail


class ConversationAnswer(Answer):
    """A conversation without its messages. Times are seconds since 1970."""

    id: int
    title: str
    system_prompt: str
    settings: dict[str, Any]
    pinned: bool
    kv_pinned: bool
    archived: bool
    created: float
    updated: float


class MessageSnippetAnswer(Answer):
    message: int
    snippet: str


class ListedConversation(ConversationAnswer):
    """What matches the query is marked with U+0002 and U+0003: in marked_title and in the latest of num_hits messages.

    snippet: the first of hits, or else the title. kv: where its keys and values are; null: not known.
    """

    snippet: str | None
    marked_title: str | None
    hits: list[MessageSnippetAnswer]
    num_hits: int
    running: bool
    kv: Literal["gpu", "host", "disk", "none"] | None


class ConversationList(Answer):
    conversations: list[ListedConversation]
    total: int


class TimingsAnswer(Answer):
    """How an answer came to be. Seconds, tokens a second, tokens, blocks."""

    ttft_s: float | None
    tokens_per_s: float | None
    num_tokens: int
    num_cached_tokens: int | None
    num_computed_tokens: int | None
    num_shared_blocks: int
    num_own_blocks: int


class MessageAnswer(Answer):
    """One node of the tree; parent is null for a first message, chosen_child the one shown under it."""

    id: int
    conversation: int
    parent: int | None
    role: Role
    text: str
    state: State
    num_token_ids: int
    num_kept_tokens: int | None
    candidate: int | None
    chosen_child: int | None
    model: str | None
    sampling: dict[str, Any] | None
    finish_reason: str | None
    error: str | None
    timings: TimingsAnswer | None
    created: float


class TreeMessage(MessageAnswer):
    """chosen: it is the one shown among its siblings where a choice was made."""

    chosen: bool


class TurnAnswer(Answer):
    """A message of the shown branch and all that share its parent."""

    message: MessageAnswer
    siblings: list[int]


class JobAnswer(Answer):
    """A running generation; messages: the answers that it writes, as its events number them."""

    id: str
    user: int
    messages: list[int]


class ConversationView(Answer):
    """What a conversation shows: the end of its branch, answers still to choose among, what runs."""

    conversation: ConversationAnswer
    turns: list[TurnAnswer]
    open_candidates: list[MessageAnswer]
    num_earlier: int
    job: JobAnswer | None


class TreeAnswer(Answer):
    """Each message behind its parent, siblings oldest first."""

    conversation: ConversationAnswer
    messages: list[TreeMessage]


class BranchAnswer(Answer):
    """From the root to the message that was asked for."""

    messages: list[MessageAnswer]


class FoundMessage(Answer):
    """snippet marks what matched with U+0002 and U+0003."""

    message: int
    conversation: int
    title: str
    role: Role
    created: float
    snippet: str


class FoundMessages(Answer):
    """next: the value of `before` for the following page; null on the last one."""

    hits: list[FoundMessage]
    next: int | None


class Started(Answer):
    job: str
    user: int
    conversation: int


class StateAnswer(Answer):
    """user: who asks, empty for whoever has the server's own key or needs none; data_folder: for that one alone."""

    version: str
    engine: Literal["starting", "ready", "dead", "stopped"]
    error: str | None
    model: dict[str, Any] | None
    features: dict[str, bool]
    is_default_model: bool
    num_conversations: int
    defaults: dict[str, Any]
    user: str
    needs_login: bool
    data_folder: str | None


class Deleted(Answer):
    deleted: int


class Stopped(Answer):
    stopped: str


class Counted(Answer):
    """Tokens. draft is null while the model's tokenizer is not there; window while the model is not."""

    history: int
    draft: int | None
    window: int | None


class LossAnswer(Answer):
    """Something that was not taken over, why, and how often."""

    what: str
    why: str
    count: int


class Imported(Answer):
    """source: the program that wrote the file; imported: the new conversations, in the file's order."""

    source: str
    imported: list[int]
    skipped: list[LossAnswer]


class ResidencyAnswer(Answer):
    """Where a conversation's KV is: tokens, blocks and bytes in the pool, in memory below it, in files."""

    conversation: str
    title: str
    tier: Literal["gpu", "host", "disk"]
    num_leases: int
    num_tokens: int
    num_blocks: int
    num_private_blocks: int
    num_bytes: int
    used_at: float
    pinned: bool
    num_host_tokens: int
    num_host_bytes: int
    num_disk_tokens: int
    num_disk_bytes: int


class ResidencyList(Answer):
    conversations: list[ResidencyAnswer]


class PoolAnswer(BaseModel):
    """The pool's audit; further figures may be added."""

    block_size: int
    num_blocks: int
    free: int
    cached: int
    referenced: int
    shared: int
    waste_tokens: int
    bytes_per_block: int
    conversations: list[ResidencyAnswer] | None = None


class Pinned(Answer):
    conversation: int
    pinned: bool


class Dropped(Answer):
    dropped: int | Literal["all"]


class Price(Answer):
    """What a turn would take: tokens, blocks, seconds; fits: whether it can run at all."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_blocks: int
    num_moved_blocks: int
    max_tokens: int
    first_token_s: float
    total_s: float
    fits: bool


ERRORS = {
    400: "The request is wrong: a field, its value, or the file.",
    404: "There is no such conversation, message or job.",
    409: "The conversation is still answering.",
    413: "The body is larger than --max-request-bytes.",
    503: "The model is not loaded, or the database cannot be used.",
}


def answers(summary: str, model: Any, description: str, *errors: int, status: int = 200) -> dict[str, Any]:
    """A route's part of the OpenAPI document: what it answers with, and its errors besides those of every route."""
    responses: dict[int | str, Any] = {status: {"model": model}} if model is not None else {}
    for error in errors:
        responses[error] = {"model": ErrorAnswer, "description": ERRORS[error]}
    responses["default"] = {"model": ErrorAnswer, "description": "Any other error, in the same form."}
    return {
        "summary": summary,
        "status_code": status,
        "response_model": None,
        "response_description": description,
        "responses": responses,
    }


def events_answer() -> dict[str, Any]:
    """The part of a route that streams a job's events."""
    described = answers("Follow a job", None, "Server-sent events; each id is the cursor from which to go on.")
    described["responses"] |= {
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        204: {"description": "Nothing more will come."},
    }
    return described | {"response_class": Response}
