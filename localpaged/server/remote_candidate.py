"""One answer that another server writes: its chunks in, events out.

What a model thinks comes in a field of its own from servers that part it; here it is put back between the tags that
models write, as answers of our own engine have it.
"""

from typing import Any

from localpaged.engine.messages import Delta, PositionLogprobs, TokenLogprob
from localpaged.server.reasoning import CLOSE, OPEN
from localpaged.server.remote_vocabulary import RemoteVocabulary

# Ends that say that nothing went wrong; others are failures, such as "content_filter" and "abort".
ENDS = {"stop": "stop", "length": "length", "eos": "stop", "stop_sequence": "stop"}


class RemoteCandidate:
    """heard: whether anything came of it. ended: it was told to be over. num_tokens: so far, by the server; or None."""

    def __init__(self, request_id: str, index: int, vocabulary: RemoteVocabulary) -> None:
        self.index = index
        self.heard = False
        self.ended = False
        self.counts = False
        self.num_tokens: int | None = None
        self.finish_reason: str | None = None
        self._id = request_id
        self._vocabulary = vocabulary
        self._stop_reason: str | int | None = None
        self._thinks = False

    @property
    def complete(self) -> bool:
        """Whether its end has come."""
        return self.ended or self.finish_reason is not None

    @property
    def strange_end(self) -> str | None:
        """How it ended, where that is a failure."""
        return self.finish_reason if self.finish_reason is not None and self.finish_reason not in ENDS else None

    def take(self, choice: dict[str, Any], num_tokens: int | None, holds_end: bool) -> Delta | None:
        """What a choice of a chunk brings. num_tokens: of this candidate so far.

        holds_end: its end waits for release(), since its tokens may be counted after it.
        """
        self.heard = True
        if self.ended:
            return None
        if num_tokens is not None:
            self.count(num_tokens)
            self.counts = True
        text = self._text(choice)
        logprobs = self._logprobs(choice.get("logprobs") or {})
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self._stop_reason = choice.get("stop_reason") or self._stop_reason
        ends = self.finish_reason is not None and not holds_end and self.strange_end is None
        if ends:
            self.ended = True
        if not (text or logprobs or ends):
            return None
        return self._delta(text, logprobs, ENDS[self.finish_reason or "stop"] if ends else None)

    def count(self, num_tokens: Any) -> None:
        if isinstance(num_tokens, int):
            self.num_tokens = num_tokens

    def release(self) -> Delta | None:
        """The end that was held back, if it has come and was none that is a failure."""
        if self.finish_reason is None or self.strange_end is not None:
            return None
        return self.end(ENDS[self.finish_reason])

    def end(self, reason: str) -> Delta | None:
        """End it, once."""
        if self.ended:
            return None
        self.ended = True
        return self._delta("", None, reason)

    def _delta(self, text: str, logprobs: list[PositionLogprobs] | None, end: str | None) -> Delta:
        return Delta(
            request_id=self._id,
            index=self.index,
            text=text,
            token_ids=[],
            logprobs=logprobs,
            finish_reason=end,
            stop_reason=self._stop_reason if end == "stop" else None,
            num_tokens=self.num_tokens,
        )

    def _text(self, choice: dict[str, Any]) -> str:
        if "text" in choice:
            return choice["text"] or ""
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        text = delta.get("content") or ""
        parts = []
        if thought:
            parts += [thought] if self._thinks else [f"{OPEN}\n", thought]
            self._thinks = True
        if text:
            parts += [f"\n{CLOSE}\n\n", text] if self._thinks else [text]
            self._thinks = False
        return "".join(parts)

    def _logprobs(self, told: dict[str, Any]) -> list[PositionLogprobs] | None:
        """From chat's form (content) or that of plain completions (tokens, token_logprobs, top_logprobs)."""
        if told.get("content"):
            return [
                self._position(one["token"], one.get("bytes"), one["logprob"], one.get("top_logprobs") or [])
                for one in told["content"]
            ]
        tokens, values = told.get("tokens") or [], told.get("token_logprobs") or []
        tops = told.get("top_logprobs") or [{}] * len(tokens)
        positions = []
        for token, value, top in zip(tokens, values, tops, strict=False):
            likeliest = sorted((top or {}).items(), key=lambda pair: -pair[1])
            others = [{"token": name, "logprob": logprob} for name, logprob in likeliest]
            positions.append(self._position(token, None, 0.0 if value is None else value, others))
        return positions or None

    def _position(
        self, token: str, raw: list[int] | None, logprob: float, top: list[dict[str, Any]]
    ) -> PositionLogprobs:
        ranked = [
            TokenLogprob(self._vocabulary.number(one["token"], one.get("bytes")), one["logprob"], rank)
            for rank, one in enumerate(top, start=1)
        ]
        token_id = self._vocabulary.number(token, raw)
        rank = next((one.rank for one in ranked if one.token_id == token_id), len(ranked) + 1)
        return PositionLogprobs(TokenLogprob(token_id, logprob, rank), ranked)
