"""The engine in this process: prompts in, answers out.

from localpaged import LLM, SamplingParams
llm = LLM()
for out in llm.generate(["Why is the sea salt?"], SamplingParams(n=4, max_tokens=64)):
    print(out.outputs[0].text)
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from localpaged.engine.build import build_engine
from localpaged.engine.config import EngineConfig
from localpaged.engine.embedding import unit_length
from localpaged.engine.messages import Admitted, Delta, Event, Failed, Generate, PositionLogprobs, Prefilled
from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import EngineDeadError, InvalidRequestError, PromptTooLongError
from localpaged.models.locate import locate_model

Prompt: TypeAlias = str | dict[str, list[int]]


@dataclass(slots=True)
class CompletionOutput:
    """One candidate. logprobs: one entry a token where SamplingParams.logprobs asked for them."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float = 0.0
    logprobs: list[PositionLogprobs] | None = None


@dataclass(slots=True)
class RequestOutput:
    """One prompt's candidates. num_cached_tokens of the prompt were not computed again."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class LLM:
    """A model in this process. model: a path or name (see `localpaged list`); None is the default model.

    Other settings are those of EngineConfig: block_size, kv_cache_memory, max_model_len, max_num_seqs,
    max_num_batched_tokens, enable_prefix_caching, dtype, device. Raises ModelError and SettingError.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        unknown = set(settings) - set(EngineConfig.__struct_fields__)
        if unknown:
            raise InvalidRequestError(
                f"LLM has no setting {', '.join(sorted(unknown))}. "
                f"It has: {', '.join(sorted(EngineConfig.__struct_fields__))}."
            )
        located = locate_model(model)
        settings.setdefault("name", located.name)
        self._engine = build_engine(EngineConfig(model=str(located.path), **settings))
        self._ids = itertools.count()
        self.info = self._engine.info

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._engine.core.vocab_size

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts (texts, or {"prompt_token_ids": [...]}), all in one batch, in their order.

        on_event sees every event as it comes. Raises InvalidRequestError, before any of it runs, for a
        prompt that cannot run.
        """
        params = sampling_params or SamplingParams()
        given = prompts if isinstance(prompts, list) else [prompts]
        return self._run([self._output(prompt, params) for prompt in given], params, on_event)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them."""
        conversations: Any = messages if messages and isinstance(messages[0], list) else [messages]
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self._engine.tokenizer.render_chat(conversation)
            prompts.append({"prompt_token_ids": self._engine.tokenizer.encode(text)})
        return self.generate(prompts, sampling_params, on_event)

    def embed(self, prompts: Prompt | list[Prompt]) -> list[list[float]]:
        """The mean of each prompt's last hidden states, after the last norm: [C] float32, of length 1.

        A chat model is not trained for this: compare it with an embedding model before you rely on it.
        """
        params = SamplingParams(max_tokens=1)
        outputs = [self._output(prompt, params) for prompt in (prompts if isinstance(prompts, list) else [prompts])]
        found: dict[str, list[float]] = {}

        def take(event: Event) -> None:
            if isinstance(event, Prefilled) and event.embedding is not None:
                found[event.request_id] = unit_length(event.embedding)

        self._run(outputs, params, take, embeds=True)
        return [found[output.request_id] for output in outputs]

    def kv_stats(self) -> dict[str, int | float | str | bool]:
        """The pool's audit: block_size, num_blocks, free, cached, referenced, shared, waste_tokens, ..."""
        return self._engine.core.stats()

    def _output(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        if isinstance(prompt, str):
            text, token_ids = prompt, self._engine.tokenizer.encode_plain(prompt)
        elif isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
            text, token_ids = None, list(prompt["prompt_token_ids"])
        else:
            raise InvalidRequestError(f"A prompt is a str or {{'prompt_token_ids': [...]}}, not {prompt!r}.")
        outputs = [CompletionOutput(index) for index in range(params.n)]
        return RequestOutput(f"llm-{next(self._ids)}", text, token_ids, outputs)

    def _run(
        self,
        outputs: list[RequestOutput],
        params: SamplingParams,
        on_event: Callable[[Event], None] | None,
        embeds: bool = False,
    ) -> list[RequestOutput]:
        core = self._engine.core
        by_id = {output.request_id: output for output in outputs}
        try:
            for output in outputs:
                command = Generate(
                    request_id=output.request_id,
                    prompt_token_ids=output.prompt_token_ids,
                    params=params,
                    goes_on=output.prompt is not None,
                    embeds=embeds,
                )
                self._take(core.submit(command), by_id, on_event)
            while core.has_work:
                self._take(core.step(), by_id, on_event)
        finally:
            # After an error or Ctrl-C nothing of this call stays in the pool.
            for output in outputs:
                core.cancel(output.request_id)
        return outputs

    @staticmethod
    def _take(events: list[Event], by_id: dict[str, RequestOutput], on_event: Callable[[Event], None] | None) -> None:
        for event in events:
            output = by_id[event.request_id]
            if isinstance(event, Failed):
                raise _as_error(event)
            if isinstance(event, Admitted):
                output.num_cached_tokens = event.num_cached_tokens or 0
            elif isinstance(event, Prefilled) and event.prompt_logprobs is not None:
                output.prompt_logprobs = event.prompt_logprobs
            elif isinstance(event, Delta):
                candidate = output.outputs[event.index]
                candidate.text += event.text
                candidate.token_ids += event.token_ids
                candidate.cumulative_logprob = event.cumulative_logprob
                candidate.finish_reason = event.finish_reason
                candidate.stop_reason = event.stop_reason
                if event.logprobs is not None:
                    candidate.logprobs = (candidate.logprobs or []) + event.logprobs
            if on_event is not None:
                on_event(event)


def _as_error(event: Failed) -> Exception:
    if event.code == PromptTooLongError.code:
        return PromptTooLongError(event.message, event.param)
    if event.code == InvalidRequestError.code:
        return InvalidRequestError(event.message, event.param)
    return EngineDeadError(event.message)
