"""The messages between the engine and whoever uses it, in process or over a socket (msgpack)."""

import msgspec

from localpaged.engine.sampling_params import SamplingParams


class TokenLogprob(msgspec.Struct, array_like=True):
    """One token's log-probability. rank 1 is the likeliest."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, array_like=True):
    """The token at one position and the likeliest alternatives there, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class Generate(msgspec.Struct, tag=True, kw_only=True):
    """Ask for the candidates of one prompt.

    conversation: whose leases the prompt may start from. lease_ids: one for each candidate, under which its blocks
    are kept when it ends; empty to keep nothing. goes_on: the answer goes on in the middle of the prompt's text, where
    how a token reads depends on those before it. embeds: no answer, but the mean of the prompt's last hidden states.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    conversation: str | None = None
    lease_ids: list[str] = []
    goes_on: bool = False
    embeds: bool = False


class Cancel(msgspec.Struct, tag=True):
    """End a request, or one of its candidates, within one step."""

    request_id: str
    index: int | None = None


class AskStats(msgspec.Struct, tag=True):
    """Ask for the pool's audit."""

    call_id: int


class Shutdown(msgspec.Struct, tag=True):
    """End the engine process."""


class ChooseLease(msgspec.Struct, tag=True):
    """Say which answer the conversation goes on from."""

    lease_id: str


class PinConversation(msgspec.Struct, tag=True):
    """Let a conversation's leases go after all others, or no longer."""

    conversation: str
    pinned: bool


class DropLeases(msgspec.Struct, tag=True, kw_only=True):
    """Give back some leases, a conversation's, or with neither all of them."""

    lease_ids: list[str] | None = None
    conversation: str | None = None


class Warm(msgspec.Struct, tag=True):
    """A conversation was opened, whose tokens these are: bring its KV in while the next message is written."""

    conversation: str
    token_ids: list[int]


class AskEstimate(msgspec.Struct, tag=True, kw_only=True):
    """Ask what a turn would cost: of these tokens, for a conversation, with n answers of up to max_tokens."""

    call_id: int
    token_ids: list[int]
    conversation: str | None
    n: int
    max_tokens: int | None


class AskResidency(msgspec.Struct, tag=True):
    """Ask what each conversation holds."""

    call_id: int


Command = (
    Generate
    | Cancel
    | AskStats
    | AskResidency
    | AskEstimate
    | ChooseLease
    | PinConversation
    | DropLeases
    | Warm
    | Shutdown
)


class ModelInfo(msgspec.Struct, kw_only=True):
    """What runs, as logged at start and shown to people. Sizes in tokens, blocks and bytes."""

    name: str
    architecture: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    longest_request: int
    weight_bytes: int
    load_s: float


class Ready(msgspec.Struct, tag=True):
    """The model is loaded and requests are taken."""

    info: ModelInfo


class StartFailed(msgspec.Struct, tag=True):
    """The model could not be loaded; the process ends."""

    message: str


class Admitted(msgspec.Struct, tag=True, kw_only=True):
    """The scheduler has taken the request. num_cached_tokens of the prompt need no computing.

    Here and in Finished: a remote engine leaves out (None) what it is not told.
    """

    request_id: str
    num_prompt_tokens: int | None
    num_cached_tokens: int | None


class Prefilled(msgspec.Struct, tag=True, kw_only=True):
    """So many of the prompt's tokens have their KV. embedding: of the whole prompt, where it was asked for."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    embedding: list[float] | None = None


class Delta(msgspec.Struct, tag=True, kw_only=True):
    """What one candidate gained: text that is final, the token ids behind it, and its end if it has come.

    finish_reason: "stop", "length", "cancelled" or "error". Text may lag behind token ids while it could
    still turn into a stop string or half a character; the last Delta of a candidate carries the rest.
    num_tokens: of the candidate so far, from an engine that tells their number and not their ids.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float = 0.0
    num_shared_blocks: int = 0
    num_own_blocks: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_tokens: int | None = None


class Finished(msgspec.Struct, tag=True, kw_only=True):
    """Every candidate has ended and every block that no cache keeps is free."""

    request_id: str
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_generated_tokens: int | None


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """The request ended with an error; code is that of the class in errors.py."""

    request_id: str
    code: str
    message: str
    param: str | None = None


class Stats(msgspec.Struct, tag=True):
    """The pool's audit and the scheduler's counters."""

    call_id: int
    values: dict[str, int | float | str | bool]


class Residency(msgspec.Struct, kw_only=True):
    """What is there of one conversation's KV.

    num_tokens: in the pool, of its longest branch; num_host_tokens, num_disk_tokens: below it, in memory and in files,
    of all branches; used_at: since 1970, s
    """

    conversation: str
    num_leases: int
    num_tokens: int
    num_blocks: int
    num_private_blocks: int
    used_at: float
    pinned: bool = False
    num_host_tokens: int = 0
    num_host_bytes: int = 0
    num_disk_tokens: int = 0
    num_disk_bytes: int = 0


class Residencies(msgspec.Struct, tag=True):
    """What each conversation holds."""

    call_id: int
    values: list[Residency]


class Estimate(msgspec.Struct, kw_only=True):
    """The price of a turn before it is asked for.

    num_cached_tokens: of the prompt, in the pool; num_loaded_tokens: further ones that would be read from below it
    num_blocks: at most, beyond what is shared; num_moved_blocks: of these, held for other conversations now
    first_token_s, total_s: expected, when every answer takes all of max_tokens
    fits: whether it can run at all
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_loaded_tokens: int
    num_blocks: int
    num_moved_blocks: int
    max_tokens: int
    first_token_s: float
    total_s: float
    fits: bool


class Estimated(msgspec.Struct, tag=True):
    """The price that was asked for."""

    call_id: int
    value: Estimate


Event = Admitted | Prefilled | Delta | Finished | Failed
Reply = Ready | StartFailed | Stats | Residencies | Estimated | Event
