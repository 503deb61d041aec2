"""Requests and their candidates: token ids, block tables and where each one is in its life.

Knows nothing of the pool, the scheduler's choices, or tensors.
"""

from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from localpaged.engine.messages import PositionLogprobs
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError

if TYPE_CHECKING:
    from localpaged.engine.guide import Guide

BlockTable: TypeAlias = list[int]


class Phase(Enum):
    """Where a request is: in the queue, computing what its candidates have in common, or each on its own."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Sequence:
    """One candidate: token ids, block table, sampling state.

    token_ids holds prompt and answer. The first num_computed of them have their KV in block_table.
    """

    __slots__ = (
        "block_table",
        "cumulative_logprob",
        "finish_reason",
        "guide",
        "index",
        "logprobs",
        "num_computed",
        "num_prompt_tokens",
        "num_registered_blocks",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: "Request", index: int) -> None:
        self.request = request
        self.index = index
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.guide: Guide | None = None
        self.block_table: BlockTable = []
        self.num_computed = 0
        self.num_registered_blocks = 0
        self.cumulative_logprob = 0.0
        self.logprobs: list[PositionLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def follow_guide(self, token_id: int) -> str | None:
        """Go on in what the answer must follow, if anything; why that cannot be, None where it can."""
        if self.guide is None:
            return None
        try:
            self.guide.take(token_id)
        except InvalidRequestError as error:
            return str(error)
        return None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing: 1 when decoding, more while a prompt or a preempted answer is computed."""
        return len(self.token_ids) - self.num_computed


class Request:
    """One prompt with its sequences. seed is drawn when the parameters leave it open.

    conversation: whose leases it may start from; lease_ids: under which its sequences' blocks are kept, or none.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        conversation: str | None = None,
        lease_ids: list[str] | None = None,
        embeds: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.conversation = conversation
        self.lease_ids = lease_ids or []
        self.phase = Phase.WAITING
        self.sequences = [Sequence(self, index) for index in range(params.num_sequences)]
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        # It waits for KV that is on its way in.
        self.held = False
        self.prompt_logprobs: list[PositionLogprobs | None] = []
        self.embeds = embeds

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def reads_every_row(self) -> bool:
        """Whether the hidden states of all of its prompt are needed, so that nothing of it can be skipped."""
        return self.embeds or self.params.prompt_logprobs is not None

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.finished]

    @property
    def leader(self) -> Sequence:
        """The candidate that computes the prompt for all of them."""
        return next(sequence for sequence in self.sequences if not sequence.finished)
