"""One choice of an answer as it grows, and how OpenAI's API writes it, whole and in chunks.

Sources: https://platform.openai.com/docs/api-reference/chat/object, .../chat/streaming, .../completions/object.
reasoning_content is DeepSeek's and vLLM's.
"""

from dataclasses import dataclass, field
from typing import Any

from localpaged.engine.messages import Delta, Finished, PositionLogprobs, TokenLogprob
from localpaged.server.reasoning import ReasoningSplitter
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


@dataclass(slots=True)
class Part:
    """What a piece of an answer brings, once what the model thinks and what it calls are told from its words."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class ChatChoice:
    """A choice of /v1/chat/completions."""

    def __init__(self, index: int, tokenizer: TokenNames, tools: Tools, thinks: bool) -> None:
        """thinks: the answer begins within what the model thinks."""
        self.index = index
        self.num_tokens: int | None = 0
        self.num_reasoning_tokens = 0
        self.has_token_ids = True
        self._tokenizer = tokenizer
        self._splitter = ReasoningSplitter(thinks)
        self._parser = tools.parser()
        self._reason: str | None = None
        self._whole = Part()

    @property
    def _num_calls(self) -> int:
        return len(self._whole.calls)

    @property
    def finish_reason(self) -> str | None:
        if self._reason is None:
            return None
        return "tool_calls" if self._whole.calls and self._reason == "stop" else FINISH_REASONS[self._reason]

    def take(self, delta: Delta) -> Part:
        """Note a piece; with the last one comes what was held back."""
        self.num_tokens = _tokens_after(self.num_tokens, delta)
        self.has_token_ids &= bool(delta.token_ids) or not delta.text
        reasoning, text = self._splitter.push(delta.text)
        if self._splitter.within:
            self.num_reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            rest = self._splitter.finish()
            reasoning, text = reasoning + rest[0], text + rest[1]
        calls: list[ToolCall] = []
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if self._reason is not None:
                rest_text, rest_calls = self._parser.finish()
                text, calls = text + rest_text, calls + rest_calls
        part = Part(reasoning, text, calls, delta.logprobs or [])
        self._whole.reasoning += reasoning
        self._whole.text += text
        self._whole.calls += calls
        self._whole.logprobs += part.logprobs
        return part

    def written(self) -> dict[str, Any]:
        """The choice as a whole."""
        whole = self._whole
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["content"] = whole.text or None
            message["tool_calls"] = [_call(call) for call in whole.calls]
        return self._framed("message", message, whole.logprobs, self.finish_reason)

    def first_chunk(self) -> dict[str, Any] | None:
        return self._framed("delta", {"role": "assistant", "content": "", "refusal": None})

    def chunk(self, part: Part) -> dict[str, Any] | None:
        """A piece; None where it has nothing to tell."""
        delta: dict[str, Any] = {"reasoning_content": part.reasoning, "content": part.text}
        first = self._num_calls - len(part.calls)
        delta["tool_calls"] = [{"index": first + i} | _call(call) for i, call in enumerate(part.calls)]
        delta = {name: value for name, value in delta.items() if value}
        return self._framed("delta", delta, part.logprobs) if delta or part.logprobs else None

    def last_chunk(self) -> dict[str, Any]:
        return self._framed("delta", {}, reason=self.finish_reason)

    def _framed(
        self,
        name: str,
        value: dict[str, Any],
        logprobs: list[PositionLogprobs] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": self.index, name: value, "logprobs": self._logprobs(logprobs), "finish_reason": reason}

    def _logprobs(self, positions: list[PositionLogprobs] | None) -> dict[str, Any] | None:
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
        self._whole = Part()
        self._offset = 0

    def take(self, delta: Delta) -> Part:
        """Note a piece."""
        self.num_tokens = _tokens_after(self.num_tokens, delta)
        self.has_token_ids &= bool(delta.token_ids) or not delta.text
        if delta.finish_reason is not None:
            self.finish_reason = FINISH_REASONS[delta.finish_reason]
        part = Part(text=delta.text, logprobs=delta.logprobs or [])
        self._whole.text += part.text
        self._whole.logprobs += part.logprobs
        return part

    def written(self) -> dict[str, Any]:
        """The choice as a whole."""
        return self._framed(self._whole, self.finish_reason)

    def first_chunk(self) -> dict[str, Any] | None:
        return None

    def chunk(self, part: Part) -> dict[str, Any] | None:
        """A piece; None where it has nothing to tell."""
        return self._framed(part, None) if part.text or part.logprobs else None

    def last_chunk(self) -> dict[str, Any]:
        return self._framed(Part(), self.finish_reason)

    def _framed(self, part: Part, reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(part.logprobs)
        return {"index": self.index, "text": part.text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, positions: list[PositionLogprobs]) -> dict[str, Any] | None:
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
