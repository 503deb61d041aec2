"""Stand-ins for the engine and the tokenizer, scripted and fast, with the real ones' interfaces."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from localpaged.engine.client import EngineClient
from localpaged.engine.messages import (
    Admitted,
    Delta,
    Estimate,
    Event,
    Failed,
    Finished,
    ModelInfo,
    Prefilled,
    Residency,
)
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import ModelError
from localpaged.models.tool_prompt import with_tools_as_text

START, END, PAIR = 256, 257, 258


class FakeTokenizer:
    """Bytes, two marks, and one merge ("ab"), so that an answer can be written in an unusual way."""

    eos_token_ids = {END}
    vocab_size = 259
    tags_tool_calls = True

    def __init__(self, strips: bool = False) -> None:
        self.strips = strips  # whether the template trims answers, as many do

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        rest = text.encode()
        while rest:
            for mark, token_id in ((b"<|im_start|>", START), (b"<|im_end|>", END), (b"ab", PAIR)):
                if rest.startswith(mark):
                    ids.append(token_id)
                    rest = rest[len(mark) :]
                    break
            else:
                ids.append(rest[0])
                rest = rest[1:]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        names = {START: b"<|im_start|>", END: b"<|im_end|>", PAIR: b"ab"}
        if skip_special_tokens:
            names |= {START: b"", END: b""}
        # As real ones do, nothing for an id that is no token.
        pieces = [names.get(token_id, bytes([token_id]) if token_id < 256 else b"") for token_id in ids]
        return b"".join(pieces).decode(errors="replace")

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        think: bool | None = None,
    ) -> str:
        messages = with_tools_as_text(messages, tools)
        turns = "".join(
            f"<|im_start|>{message['role']}\n"
            f"{message['content'].strip() if self.strips else message['content']}<|im_end|>\n"
            for message in messages
        )
        return turns + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def answer_with_letters(prompt: str, index: int) -> str:
    return f"Answer {'ABCDEFGH'[index % 8]}: it is **paged**."


class FakeEngine(EngineClient):
    """Streams scripted answers one byte-token at a time; can stall, fail, die and load slowly.

    answer(prompt text, candidate) -> text. prompts keeps the ids of every request, cancelled the
    cancels. hold: tokens wait until it is set. It reports reuse of any earlier prompt's full blocks.
    """

    block_size = 16

    def __init__(
        self,
        answer: Callable[[str, int], str] = answer_with_letters,
        tokenizer: FakeTokenizer | None = None,
        token_s: float = 0.0,
        load_s: float = 0.0,
        load_error: str | None = None,
        max_model_len: int = 8192,
        chars_per_token: int = 1,
    ) -> None:
        self.answer = answer
        self.tokenizer = tokenizer or FakeTokenizer()
        self.token_s = token_s
        self.load_s = load_s
        self.load_error = load_error
        self.max_model_len = max_model_len
        self.chars_per_token = chars_per_token
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.cancelled: list[tuple[str, int | None]] = []
        self.told: list[tuple[object, ...]] = []  # of leases
        self.hold: asyncio.Event | None = None
        self.die_after: int | None = None
        self.starts = 0
        self.num_restarts = 0
        self.info: ModelInfo | None = None
        self.start_error: str | None = None
        self.state: Literal["starting", "ready", "dead", "stopped"] = "stopped"
        self._loaded = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.starts += 1
        self.state = "starting"
        self._loaded.clear()
        self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        await asyncio.sleep(self.load_s)
        if self.load_error:
            self.start_error, self.state = self.load_error, "dead"
        else:
            self.info = ModelInfo(
                name="fake-135M",
                architecture="LlamaForCausalLM",
                dtype="float32",
                device="cpu",
                block_size=self.block_size,
                num_blocks=4096,
                bytes_per_block=737_280,
                max_model_len=self.max_model_len,
                longest_request=self.max_model_len,
                weight_bytes=270_000_000,
                load_s=self.load_s,
            )
            self.state = "ready"
        self._loaded.set()

    async def wait_ready(self) -> ModelInfo:
        await self._loaded.wait()
        if self.info is None or self.start_error:
            raise ModelError(self.start_error or "The model could not be loaded.")
        return self.info

    def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None, **more: Any
    ) -> AsyncIterator[Event]:
        if more.get("embeds"):
            return self._embed(prompt_token_ids, request_id or "request")
        return self._generate(prompt_token_ids, params, request_id or "request")

    async def _embed(self, prompt: list[int], request_id: str) -> AsyncIterator[Event]:
        """The prompt's length and its first token, not of length 1."""
        n = len(prompt)
        yield Admitted(request_id=request_id, num_prompt_tokens=n, num_cached_tokens=0)
        values = [float(n), float(prompt[0]), 0.0]
        yield Prefilled(request_id=request_id, num_computed_tokens=n, num_prompt_tokens=n, embedding=values)
        yield Finished(request_id=request_id, num_prompt_tokens=n, num_cached_tokens=0, num_generated_tokens=0)

    async def _generate(self, prompt: list[int], params: SamplingParams, request_id: str) -> AsyncIterator[Event]:
        if self.state == "dead":
            await self.start()
        await self.wait_ready()
        if len(prompt) >= self.max_model_len:
            message = (
                f"The prompt has {len(prompt):,} tokens and the model's window is {self.max_model_len:,}."
                " Shorten it or start a new conversation."
            )
            yield Failed(request_id=request_id, code="context_length_exceeded", message=message)
            return
        cached = max((_num_common(prompt, earlier) for earlier in self.prompts), default=0)
        cached = min(cached, len(prompt) - 1) // self.block_size * self.block_size
        self.prompts.append(prompt)
        self.params.append(params)
        yield Admitted(request_id=request_id, num_prompt_tokens=len(prompt), num_cached_tokens=cached)
        yield Prefilled(request_id=request_id, num_computed_tokens=len(prompt), num_prompt_tokens=len(prompt))
        text = self.tokenizer.decode(prompt)
        pending = {index: self.answer(text, index) for index in range(params.n)}
        counts = dict.fromkeys(pending, 0)
        num_steps = dict.fromkeys(pending, 0)
        steps = 0
        while pending:
            if self.hold is not None and steps:
                await _first(self.hold.wait(), self._cancel_of(request_id, pending))
            await asyncio.sleep(self.token_s)
            steps += 1
            if self.die_after is not None and steps > self.die_after:
                self.state, self.die_after = "dead", None
                message = "The engine process ended unexpectedly. Send again: a fresh one is started."
                yield Failed(request_id=request_id, code="engine_dead", message=message)
                return
            for index in list(pending):
                piece = pending[index][: self.chars_per_token]
                pending[index] = pending[index][self.chars_per_token :]
                ids = self.tokenizer.encode(piece)
                counts[index] += len(ids)
                num_steps[index] += 1
                finish = None
                if (request_id, None) in self.cancelled or (request_id, index) in self.cancelled:
                    finish, piece, ids = "cancelled", "", []
                elif params.max_tokens is not None and num_steps[index] >= params.max_tokens:
                    finish = "length"
                elif not pending[index]:
                    finish, ids = "stop", [*ids, END]
                yield Delta(
                    request_id=request_id,
                    index=index,
                    text=piece,
                    token_ids=ids,
                    num_shared_blocks=len(prompt) // self.block_size,
                    num_own_blocks=counts[index] // self.block_size + 1,
                    finish_reason=finish,
                )
                if finish:
                    del pending[index]
        yield Finished(
            request_id=request_id,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=cached,
            num_generated_tokens=sum(counts.values()),
        )

    async def _cancel_of(self, request_id: str, pending: dict[int, str]) -> None:
        while not any(key[0] == request_id and key[1] in (None, *pending) for key in self.cancelled):
            await asyncio.sleep(0.001)

    async def cancel(self, request_id: str, index: int | None = None) -> None:
        self.cancelled.append((request_id, index))

    async def estimate(
        self, token_ids: list[int], conversation: str | None, n: int, max_tokens: int | None
    ) -> Estimate:
        longest = max_tokens or 512
        return Estimate(
            num_prompt_tokens=len(token_ids),
            num_cached_tokens=0,
            num_loaded_tokens=0,
            num_blocks=-(-len(token_ids) // self.block_size) + n * -(-longest // self.block_size),
            num_moved_blocks=0,
            max_tokens=longest,
            first_token_s=0.2,
            total_s=0.2 + 0.01 * longest,
            fits=True,
        )

    def pin(self, conversation: str, pinned: bool) -> None:
        self.told.append(("pin", conversation, pinned))

    def choose_lease(self, lease_id: str) -> None:
        self.told.append(("choose", lease_id))

    def drop_leases(self, conversation: str | None = None, lease_ids: list[str] | None = None) -> None:
        self.told.append(("drop", conversation, lease_ids))

    def warm(self, conversation: str, token_ids: list[int]) -> None:
        self.told.append(("warm", conversation, len(token_ids)))

    async def residency(self) -> list[Residency]:
        return []

    async def stats(self) -> dict[str, int | float | str | bool]:
        return {
            "block_size": self.block_size,
            "num_blocks": 4096,
            "free": 3584,
            "cached": 412,
            "referenced": 100,
            "shared": 64,
            "waste_tokens": 7,
            "bytes_per_block": 737_280,
        }

    async def stop(self) -> None:
        if self._loading:
            self._loading.cancel()
        self.state = "stopped"


async def _first(*coroutines) -> None:  # type: ignore[no-untyped-def]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _num_common(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
