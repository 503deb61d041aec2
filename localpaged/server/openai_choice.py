"""One choice of an answer as it grows, and how OpenAI's API writes it, whole and in chunks.

Sources: https://platform.openai.com/docs/api-reference/chat/object, .../chat/streaming, .../completions/object.
reasoning_content is DeepSeek's and vLLM's.
"""

from dataclasses import dataclass
from typing import Any

from localpaged.engine.messages import Delta, Finished, PositionLogprobs, TokenLogprob
from localpaged.server.answer_parser import AnswerParser, Part
from localpaged.server.served_model import TokenNames
from localpaged.server.tool_calls import ToolCall
from localpaged.server.tools import Tools

FINISH_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop", "error": "stop"}


@dataclass(slots=True)
class Usage:
    """Tokens of all prompts and choices; a prompt counts once, however many choices it has. None: not known."""

    prompt: int | None = 0
    cached: int | None = 0
    completion: int | None = 0

    def add(self, event: Finished) -> None:
        self.prompt = _plus(self.prompt, event.num_prompt_tokens)
        self.cached = _plus(self.cached, event.num_cached_tokens)
        self.completion = _plus(self.completion, event.num_generated_tokens)

    def report(self, choices: "list[ChatChoice] | list[CompletionChoice]") -> dict[str, Any] | None:
        """With what each choice took, by index: choice_tokens is localpaged's own. None when a remote tells nothing."""
        if self.prompt is None or self.completion is None:
            return None
        details: dict[str, Any] = {}
        # Without token ids it is not known which of them were thought.
        if all(choice.has_token_ids for choice in choices):
            details["reasoning_tokens"] = sum(choice.num_reasoning_tokens for choice in choices)
        if all(choice.num_tokens is not None for choice in choices):
            details["choice_tokens"] = [choice.num_tokens for choice in choices]
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": None if self.cached is None else {"cached_tokens": self.cached},
            "completion_tokens_details": details or None,
        }


def _tokens_after(before: int | None, delta: Delta) -> int | None:
    """A choice's tokens with those of a delta; an engine without token ids tells their number, or nothing."""
    if delta.num_tokens is not None:
        return delta.num_tokens
    return None if delta.text and not delta.token_ids else _plus(before, len(delta.token_ids))


def _plus(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


class ChatChoice:
    """A choice of /v1/chat/completions."""

    def __init__(self, index: int, tokenizer: TokenNames, tools: Tools, thinks: bool) -> None:
        """thinks: the answer begins within what the model thinks."""
        self.index = index
        self.num_tokens: int | None = 0
        self.num_reasoning_tokens = 0
        self.has_token_ids = True
        self._tokenizer = tokenizer
        self._answer = AnswerParser(tools, thinks)
        self._logprobs: list[PositionLogprobs] = []
        self._reason: str | None = None

    @property
    def finish_reason(self) -> str | None:
        if self._reason is None:
            return None
        return "tool_calls" if self._answer.whole.calls and self._reason == "stop" else FINISH_REASONS[self._reason]

    def take(self, delta: Delta) -> Part:
        """Note a piece; with the last one comes what was held back."""
        self.num_tokens = _tokens_after(self.num_tokens, delta)
        self.has_token_ids &= bool(delta.token_ids) or not delta.text
        self._reason = delta.finish_reason
        self._logprobs += delta.logprobs or []
        part = self._answer.take(delta.text, ended=delta.finish_reason is not None)
        if self._answer.thinking:
            self.num_reasoning_tokens += len(delta.token_ids)
        return part

    def written(self) -> dict[str, Any]:
        """The choice as a whole."""
        whole = self._answer.whole
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["content"] = whole.text or None
            message["tool_calls"] = [_call(call) for call in whole.calls]
        return self._framed("message", message, self._logprobs, self.finish_reason)

    def first_chunk(self) -> dict[str, Any] | None:
        return self._framed("delta", {"role": "assistant", "content": "", "refusal": None})

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """Note a piece and write it; None where it has nothing to tell."""
        part = self.take(delta)
        written: dict[str, Any] = {"reasoning_content": part.reasoning, "content": part.text}
        first = len(self._answer.whole.calls) - len(part.calls)
        written["tool_calls"] = [{"index": first + i} | _call(call) for i, call in enumerate(part.calls)]
        written = {name: value for name, value in written.items() if value}
        return self._framed("delta", written, delta.logprobs) if written or delta.logprobs else None

    def last_chunk(self) -> dict[str, Any]:
        return self._framed("delta", {}, reason=self.finish_reason)

    def _framed(
        self,
        name: str,
        value: dict[str, Any],
        logprobs: list[PositionLogprobs] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": self.index, name: value, "logprobs": self._told(logprobs), "finish_reason": reason}

    def _told(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
        if not positions:
            return None
        content = [
            self._token(position.chosen) | {"top_logprobs": [self._token(token) for token in position.top]}
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token.token_id),
            "logprob": token.logprob,
            "bytes": list(self._tokenizer.token_bytes(token.token_id)),
        }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class CompletionChoice:
    """A choice of /v1/completions."""

    num_reasoning_tokens = 0

    def __init__(self, index: int, tokenizer: TokenNames) -> None:
        self.index = index
        self.num_tokens: int | None = 0
        self.has_token_ids = True
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._text = ""
        self._logprobs: list[PositionLogprobs] = []
        self._offset = 0

    def take(self, delta: Delta) -> None:
        """Note a piece."""
        self.num_tokens = _tokens_after(self.num_tokens, delta)
        self.has_token_ids &= bool(delta.token_ids) or not delta.text
        if delta.finish_reason is not None:
            self.finish_reason = FINISH_REASONS[delta.finish_reason]
        self._text += delta.text
        self._logprobs += delta.logprobs or []

    def written(self) -> dict[str, Any]:
        """The choice as a whole."""
        return self._framed(self._text, self._logprobs, self.finish_reason)

    def first_chunk(self) -> dict[str, Any] | None:
        return None

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """Note a piece and write it; None where it has nothing to tell."""
        self.take(delta)
        return self._framed(delta.text, delta.logprobs or [], None) if delta.text or delta.logprobs else None

    def last_chunk(self) -> dict[str, Any]:
        return self._framed("", [], self.finish_reason)

    def _framed(self, text: str, logprobs: list[PositionLogprobs], reason: str | None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "logprobs": self._told(logprobs), "finish_reason": reason}

    def _told(self, positions: list[PositionLogprobs]) -> dict[str, Any] | None:
        """text_offset counts from where the answer begins, through all chunks."""
        if not positions:
            return None
        text = self._tokenizer.token_text
        tokens = [text(position.chosen.token_id) for position in positions]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [position.chosen.logprob for position in positions],
            "top_logprobs": [{text(t.token_id): t.logprob for t in position.top} for position in positions],
            "text_offset": offsets,
        }
