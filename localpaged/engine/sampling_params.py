"""What a request asks of the sampler. Knows nothing of models or tensors."""

import math
from typing import Any

import msgspec

from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError

MAX_CANDIDATES = 64
MAX_LOGPROBS = 20
# Token ids and counts are 32-bit numbers.
LARGEST = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the candidates of one request are drawn. Raises InvalidRequestError for a value out of range.

    n: candidates returned. best_of: candidates drawn, of which the n with the highest
    cumulative log-probability are returned (default n). beam_width: beam search with that many
    beams instead of drawing. temperature 0 is greedy. top_k 0 and top_p 1 keep every token;
    min_p keeps tokens at least that fraction as likely as the likeliest. repetition_penalty
    divides (over 1) the score of tokens in the prompt or the answer; presence_penalty and
    frequency_penalty subtract for tokens in the answer, once or per occurrence. logit_bias maps
    token ids to what is added to their score. seed: the same seed draws the same tokens for each
    candidate, whatever else runs; None takes a fresh one. stop: strings that end an answer and
    are not part of it. stop_token_ids: likewise tokens. min_tokens: no end before that many.
    max_tokens: None means up to the window. logprobs: how many alternatives to report for each
    token (0: only the chosen one's); prompt_logprobs likewise for the prompt. structured_outputs:
    what answers must look like, token by token.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _in_range("n", self.n, 1, MAX_CANDIDATES)
        if self.best_of is not None:
            _in_range("best_of", self.best_of, self.n, MAX_CANDIDATES)
        if self.beam_width is not None:
            _in_range("beam_width", self.beam_width, self.n, MAX_CANDIDATES)
            if self.best_of is not None:
                raise InvalidRequestError("beam_width and best_of exclude each other: give one.", "best_of")
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_k", self.top_k, 0, LARGEST)
        _in_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1.", "top_p")
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("min_tokens", self.min_tokens, 0, LARGEST)
        if self.seed is not None:
            _in_range("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 1, LARGEST)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}: lower min_tokens.",
                    "min_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _in_range(name, value, 0, MAX_LOGPROBS)
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id <= LARGEST or math.isnan(bias):
                raise InvalidRequestError(
                    f"logit_bias maps token {token_id} to {bias}: token ids are 0 to {LARGEST}, biases numbers.",
                    "logit_bias",
                )
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_tokens", "beam_width"):
                if getattr(self, name):
                    raise InvalidRequestError(
                        f"{name} does not go with structured_outputs, which say where an answer ends: leave one out.",
                        name,
                    )
        for token_id in self.stop_token_ids:
            _in_range("stop_token_ids", token_id, 0, LARGEST)
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop has an empty string: leave it out.", "stop")

    @property
    def num_sequences(self) -> int:
        """How many sequences the engine runs for this request."""
        return self.beam_width or self.best_of or self.n

    @property
    def needs_ranking(self) -> bool:
        """Whether the returned candidates are known only when all are complete."""
        return self.beam_width is not None or self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _in_range(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidRequestError(f"{name} is {value!r}; it must be a number.", name)
    if not low <= value <= high:
        bounds = f"at least {low:g}" if value < low and high == LARGEST else f"from {low:g} to {high:g}"
        raise InvalidRequestError(f"{name} is {value:g}; it must be {bounds}.", name)
