"""Answers that follow a JSON schema, a regular expression or a grammar: which tokens may come next.

llguidance parses and computes; here is one guide a candidate, which goes on with the tokens that it draws.
Source: https://github.com/guidance-ai/llguidance; names as in vLLM's structured outputs.
"""

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError

if TYPE_CHECKING:
    from localpaged.models.chat_tokenizer import ChatTokenizer

# As a person would lay JSON out; without a bound a small model may go on with blanks for ever.
WHITESPACE = r"[ \n]{0,12}"


class Guide:
    """Where one candidate is in what it must follow."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        # Which tokens may come next; at least one may.
        self.allowed: NDArray[np.bool_] = np.zeros(vocab_size, dtype=np.bool_)
        self._find_allowed()

    def copy(self) -> "Guide":
        """Another candidate at the same place."""
        return Guide(self._matcher.deep_copy(), len(self.allowed))

    def take(self, token_id: int) -> None:
        """Go on with a token that was allowed. Raises InvalidRequestError when what comes next cannot be computed."""
        self._matcher.consume_token(token_id)
        self._find_allowed()

    def _find_allowed(self) -> None:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise InvalidRequestError(
                f"What the answer must follow is too much: {self._matcher.get_error()}. Make it simpler.",
                "structured_outputs",
            )
        self.allowed = np.zeros(len(self.allowed), dtype=np.bool_)
        self.allowed[: len(bits)] = bits[: len(self.allowed)]


class Guides:
    """Makes guides for one model's tokens."""

    def __init__(self, tokenizer: "ChatTokenizer", vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._tokens: Any = None

    def start(self, wanted: StructuredOutputs) -> Guide:
        """A guide at the beginning of an answer. Raises InvalidRequestError, with what is wrong, for a bad schema."""
        from llguidance import LLMatcher

        if self._tokens is None:
            self._tokens = self._tokenizer.guidance_tokens(self._vocab_size, self._eos_token_ids)
        try:
            grammar = _grammar(wanted)
        except ValueError as error:
            raise InvalidRequestError(f"{wanted.param}: {error}.", wanted.param) from error
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            told = matcher.get_error().strip().splitlines()[0]
            raise InvalidRequestError(f"{wanted.param} cannot be used: {told}", wanted.param)
        return Guide(matcher, self._vocab_size)


def _grammar(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if wanted.json is not None or wanted.json_object:
        schema = json.dumps(wanted.json if wanted.json is not None else {"type": "object"})
        grammar: str = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
        return grammar
    if wanted.regex is not None:
        return str(LLMatcher.grammar_from_regex(wanted.regex))
    if wanted.choice is not None:
        return "start: " + " | ".join(json.dumps(text) for text in wanted.choice)
    assert wanted.grammar is not None
    return wanted.grammar
