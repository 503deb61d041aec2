"""One request of the engine, and what has been told of each of its candidates."""

from dataclasses import dataclass

from torch import Tensor

from localpaged.engine.beam_search import BeamSearch
from localpaged.engine.block_pool import BlockPool
from localpaged.engine.detokenizer import Detokenizer
from localpaged.engine.messages import Delta, PositionLogprobs
from localpaged.engine.sequence import Request, Sequence


@dataclass(slots=True)
class Candidate:
    """What has been told of one candidate."""

    detokenizer: Detokenizer
    text: str = ""
    num_table_blocks: int = -1
    num_shared_blocks: int = 0
    num_own_blocks: int = 0


@dataclass(slots=True)
class Job:
    """One request and what is needed to report on it."""

    request: Request
    candidates: list[Candidate]
    beams: BeamSearch | None = None
    num_generated_tokens: int = 0
    # [C], of the prompt's hidden states so far, where an embedding is asked for.
    hidden_sum: Tensor | None = None

    def delta(
        self,
        pool: BlockPool,
        sequence: Sequence,
        token_ids: list[int] | None = None,
        logprobs: PositionLogprobs | None = None,
    ) -> Delta:
        """What a candidate gained, with the blocks that it shares and has to itself; text is still to be filled in."""
        candidate = self.candidates[sequence.index]
        table = sequence.block_table
        # Counting references costs the table's length, so it is done when the table grows.
        if len(table) != candidate.num_table_blocks:
            own = sum(pool.reference_count(block) == 1 for block in table)
            candidate.num_table_blocks = len(table)
            candidate.num_own_blocks, candidate.num_shared_blocks = own, len(table) - own
        return Delta(
            request_id=self.request.request_id,
            index=sequence.index,
            text="",
            token_ids=token_ids or [],
            logprobs=[logprobs] if logprobs is not None else None,
            cumulative_logprob=sequence.cumulative_logprob,
            num_shared_blocks=candidate.num_shared_blocks,
            num_own_blocks=candidate.num_own_blocks,
        )
