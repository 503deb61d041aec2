"""An answer as Anthropic's API writes it: a message with blocks of thinking, text and calls, whole and in events.

Sources: https://platform.claude.com/docs/en/api/messages/create, .../build-with-claude/streaming.
"""

import json
from collections.abc import Iterator
from typing import Any

from localpaged.server.answer_parser import AnswerParser, Part
from localpaged.server.anthropic_schema import CALL_PREFIX
from localpaged.server.generation import Answer
from localpaged.server.tool_calls import ToolCall

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "cancelled": "end_turn", "error": "end_turn"}
# What a block is called, the field that grows in it, and its delta.
GROWING = {"thinking": ("thinking", "thinking_delta"), "text": ("text", "text_delta")}


class MessageWriter:
    """One message. answer: takes the engine's events, before what they bring is written."""

    def __init__(self, message_id: str, model: str, parser: AnswerParser) -> None:
        self.id = message_id
        self.answer = Answer()
        self._model = model
        self._parser = parser
        self._open: str | None = None  # the kind of the block that is being written
        self._num_blocks = 0

    def whole(self) -> dict[str, Any]:
        """The message when its answer has ended."""
        self._parser.take(self.answer.text, ended=True)
        part = self._parser.whole
        content: list[dict[str, Any]] = []
        if part.reasoning:
            content.append(_block("thinking") | {"thinking": part.reasoning})
        if part.text or not part.calls:
            content.append(_block("text") | {"text": part.text})
        content += [_call(call) | {"input": json.loads(call.arguments)} for call in part.calls]
        return self._message(content)

    def begin(self) -> str:
        """The stream's first event."""
        return sse("message_start", message=self._message([]))

    def take(self, text: str) -> Iterator[str]:
        """The events of a further piece."""
        yield from self._tell(self._parser.take(text, ended=False))

    def finish(self) -> Iterator[str]:
        """The events at the answer's end."""
        yield from self._tell(self._parser.take("", ended=True))
        if self._num_blocks == 0 and self._open is None:
            yield from self._begin_block("text", _block("text"))
        yield from self._end_block()
        yield sse("message_delta", delta=self._end(), usage=self._usage())
        yield sse("message_stop")

    def _tell(self, part: Part) -> Iterator[str]:
        for kind, piece in (("thinking", part.reasoning), ("text", part.text)):
            if piece:
                if self._open != kind:
                    yield from self._end_block()
                    yield from self._begin_block(kind, _block(kind))
                field, delta = GROWING[kind]
                yield sse("content_block_delta", index=self._num_blocks, delta={"type": delta, field: piece})
        for call in part.calls:
            yield from self._end_block()
            yield from self._begin_block("tool_use", _call(call) | {"input": {}})
            arguments = {"type": "input_json_delta", "partial_json": call.arguments}
            yield sse("content_block_delta", index=self._num_blocks, delta=arguments)
            yield from self._end_block()

    def _begin_block(self, kind: str, block: dict[str, Any]) -> Iterator[str]:
        self._open = kind
        yield sse("content_block_start", index=self._num_blocks, content_block=block)
        if self._num_blocks == 0:
            yield sse("ping")

    def _end_block(self) -> Iterator[str]:
        if self._open is not None:
            yield sse("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = None

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **self._end(),
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, str | None]:
        """Why the answer ended. A token that ends it has a number, a stop sequence its text."""
        answer = self.answer
        if isinstance(answer.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        reason = STOP_REASONS[answer.finish_reason] if answer.finish_reason is not None else None
        if reason == "end_turn" and self._parser.whole.calls:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, int | None]:
        """The tokens so far. A prompt's are input_tokens and cache_read_input_tokens together.

        null where a remote engine has not told them; where it does not tell those in its cache, all are input_tokens.
        """
        answer, prompt = self.answer, self.answer.num_prompt_tokens
        return {
            "input_tokens": None if prompt is None else prompt - (answer.num_cached_tokens or 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.num_cached_tokens,
            "output_tokens": answer.num_generated_tokens,
        }


def _block(kind: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": "", "signature": ""} if kind == "thinking" else {"type": kind, "text": ""}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": CALL_PREFIX + call.id, "name": call.name}


def sse(type: str, **fields: Any) -> str:
    """One event; its data repeats its name."""
    return f"event: {type}\ndata: {json.dumps({'type': type, **fields}, ensure_ascii=False)}\n\n"
