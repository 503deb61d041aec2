"""An answer as /v1/responses writes it: the response object, and the events of its stream.

Sources: https://platform.openai.com/docs/api-reference/responses/object, .../responses-streaming. What a model thinks
is an item of type reasoning before the message, its text in reasoning_text parts, as vLLM has it.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from localpaged.server.reasoning import ReasoningSplitter
from localpaged.server.responses_schema import ResponsesBody


@dataclass(slots=True)
class Progress:
    """What has come of an answer since the last of these; counts are those of the whole answer so far, None: not known.

    finish_reason: as the engine has it, once it has ended; error: what went wrong, in words for people.
    """

    text: str = ""
    num_prompt_tokens: int | None = 0
    num_cached_tokens: int | None = 0
    num_generated_tokens: int | None = 0
    finish_reason: str | None = None
    error: str | None = None
    code: str = "server_error"


class ResponseWriter:
    """One response as it grows."""

    def __init__(
        self, response_id: str, model: str, body: ResponsesBody, thinks: bool, count: Callable[[str], int] | None
    ) -> None:
        """thinks: the answer begins within what the model thinks. count: the tokens of a text; None: nobody knows."""
        self._id = response_id
        self._model = model
        self._body = body
        self._created = int(time.time())
        self._splitter = ReasoningSplitter(thinks)
        self._texts = {"reasoning": "", "message": ""}
        self._open: str | None = None  # the item that is being written
        self._items: list[dict[str, Any]] = []
        self._count = count
        self._sequence = 0
        self._last = Progress()

    def begin(self) -> Iterator[str]:
        """The stream's first events."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self.response("in_progress"))

    def take(self, progress: Progress) -> Iterator[str]:
        """Note what has come; the events that tell of it. Exhaust it even where nobody reads them."""
        reasoning, text = self._splitter.push(progress.text)
        ended = progress.finish_reason is not None or progress.error is not None
        if ended:
            rest = self._splitter.finish()
            reasoning, text = reasoning + rest[0], text + rest[1]
        self._last = progress
        if reasoning:
            yield from self._say("reasoning", reasoning)
        if text:
            yield from self._say("message", text)
        if ended:
            if self._open is None and progress.error is None:
                yield from self._begin_item("message")
            yield from self._end_item("incomplete" if progress.finish_reason == "length" else "completed")
            response = self.response()
            yield self._event(f"response.{response['status']}", response=response)

    def response(self, status: str | None = None) -> dict[str, Any]:
        """The response object; status: where it is not that of an answer that has ended."""
        last, body = self._last, self._body
        if status is None:
            ends = {"length": "incomplete", "cancelled": "incomplete"}
            status = "failed" if last.error is not None else ends.get(last.finish_reason or "", "completed")
        form = body.text.format.model_dump(by_alias=True) if body.text and body.text.format else {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": {"code": last.code, "message": last.error} if last.error is not None else None,
            "incomplete_details": {"reason": "max_output_tokens"} if last.finish_reason == "length" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": body.keeps,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form, "verbosity": "medium"},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any] | None:
        last = self._last
        if last.num_prompt_tokens is None or last.num_generated_tokens is None:
            return None
        reasoning = 0 if self._count is None else self._count(self._texts["reasoning"])
        return {
            "input_tokens": last.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": last.num_cached_tokens or 0},
            "output_tokens": last.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": last.num_prompt_tokens + last.num_generated_tokens,
        }

    def _say(self, kind: str, text: str) -> Iterator[str]:
        if self._open != kind:
            yield from self._end_item("completed")
            yield from self._begin_item(kind)
        self._texts[kind] += text
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(name, **self._place(), delta=text, **more)

    def _begin_item(self, kind: str) -> Iterator[str]:
        self._open = kind
        self._texts[kind] = ""
        item = self._item("in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=len(self._items), item=item)
        if kind == "message":
            yield self._event("response.content_part.added", **self._place(), part=self._part())

    def _end_item(self, status: str) -> Iterator[str]:
        if self._open is None:
            return
        item, text = self._item(status), self._texts[self._open]
        if self._open == "message":
            yield self._event("response.output_text.done", **self._place(), text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._place(), part=self._part())
        else:
            yield self._event("response.reasoning_text.done", **self._place(), text=text)
        yield self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id(), "output_index": len(self._items), "content_index": 0}

    def _item_id(self) -> str:
        prefix = "msg" if self._open == "message" else "rs"
        return f"{prefix}_{self._id.removeprefix('resp_')}_{len(self._items)}"

    def _part(self) -> dict[str, Any]:
        if self._open == "message":
            return {"type": "output_text", "text": self._texts["message"], "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": self._texts["reasoning"]}

    def _item(self, status: str) -> dict[str, Any]:
        more: dict[str, Any] = {"role": "assistant"} if self._open == "message" else {"summary": []}
        return {"id": self._item_id(), "type": self._open, "status": status, "content": [self._part()]} | more

    def _event(self, name: str, **fields: Any) -> str:
        data = {"type": name, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
