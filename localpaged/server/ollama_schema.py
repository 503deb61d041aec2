"""Request bodies of the Ollama-compatible API, as strict as they are read.

A field or option that is not known, or known and not supported, is refused by name. Options that change nothing here
are accepted; INERT lists them. Those that are left out have Ollama's defaults, but for repeat_penalty, which is off:
here it looks at the whole prompt and answer, there at the last 64 tokens. A num_ctx below the model's window cuts
nothing off; it only says where num_predict -2 ends.
Sources: https://docs.ollama.com/api/chat, https://docs.ollama.com/api/generate, https://docs.ollama.com/modelfile.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError
from localpaged.server.tool_calls import new_id
from localpaged.server.tools import Function, Tools
from localpaged.server.unsupported import Unsupported

# How the model is loaded is decided at the server's start; no context is ever shifted (num_keep); mirostat is off.
INERT = (
    "keep_alive",
    "num_thread",
    "num_gpu",
    "main_gpu",
    "num_batch",
    "num_keep",
    "numa",
    "low_vram",
    "f16_kv",
    "use_mmap",
    "use_mlock",
    "mirostat_tau",
    "mirostat_eta",
)
# Options that are not supported, and the value at which they ask for nothing that is not done anyway.
NEUTRAL = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "repeat_last_n": -1, "penalize_newline": True}
# What the engine calls them.
OPTION_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}


class Options(BaseModel):
    """The body's options. num_predict: -1 goes on up to the window, -2 up to num_ctx."""

    model_config = ConfigDict(extra="forbid", strict=True)

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    num_ctx: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_changes_nothing(cls, options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        for name, neutral in NEUTRAL.items():
            if options.get(name) not in (None, neutral):
                raise PydanticCustomError("unsupported", "{name} is not supported here: leave it out", {"name": name})
        return {name: value for name, value in options.items() if name not in INERT and name not in NEUTRAL}

    def sampling_params(
        self, num_prompt_tokens: int | None, window: int | None, structured: StructuredOutputs | None = None
    ) -> SamplingParams:
        """As the engine takes them. window: the model's, in tokens. Raises InvalidRequestError naming the option.

        num_prompt_tokens: None for a remote engine. Not every one knows top_k: it is sent where it is asked for.
        """
        default_top_k = 0 if num_prompt_tokens is None else 40
        values = {
            "temperature": 0.8 if self.temperature is None else self.temperature,
            # Ollama takes 0 and less for every token.
            "top_k": default_top_k if self.top_k is None else max(self.top_k, 0),
            "top_p": 0.9 if self.top_p is None else self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == -1 else self.seed,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
        }
        max_tokens = self._max_tokens(num_prompt_tokens, window)
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return SamplingParams(max_tokens=max_tokens, structured_outputs=structured, **given)  # type: ignore[arg-type]
        except InvalidRequestError as error:
            param = error.param or ""
            name = OPTION_NAMES.get(param, param)
            raise InvalidRequestError(str(error).replace(param, name), name) from error

    def _max_tokens(self, num_prompt_tokens: int | None, window: int | None) -> int | None:
        if self.num_ctx is not None and window is not None and not 1 <= self.num_ctx <= window:
            raise InvalidRequestError(
                f"num_ctx is {self.num_ctx:,} and the model's window is {window:,}. Ask for 1 to {window:,} tokens, or "
                "leave it out.",
                "num_ctx",
            )
        if self.num_predict is None or self.num_predict == -1:
            return None
        if self.num_predict == -2:
            if self.num_ctx is None or self.num_ctx == window:
                return None
            if num_prompt_tokens is None:
                raise InvalidRequestError(
                    "num_predict -2 counts the prompt's tokens, which only the server that answers can. Give a number.",
                    "num_predict",
                )
            if num_prompt_tokens >= self.num_ctx:
                raise InvalidRequestError(
                    f"The prompt has {num_prompt_tokens:,} tokens and num_ctx is {self.num_ctx:,}: num_predict -2 "
                    "leaves the answer no room. Raise num_ctx, or leave it out.",
                    "num_ctx",
                )
            return self.num_ctx - num_prompt_tokens
        if self.num_predict < 1:
            raise InvalidRequestError(
                f"num_predict is {self.num_predict}; it must be at least 1, or -1 or -2 for as many as there is room.",
                "num_predict",
            )
        return self.num_predict


class GenerationBody(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    # A level is as true; what a model thinks is told apart from its answer in any case.
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: Unsupported = None
    top_logprobs: Unsupported = None
    # A prompt that is too long is an error, never cut.
    truncate: Unsupported = None
    shift: Unsupported = None

    def structured_outputs(self) -> StructuredOutputs | None:
        """What the answer must look like, from `format`: "json" for any object, or a JSON schema."""
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return StructuredOutputs(json=self.format, param="format")
        return StructuredOutputs(json_object=True, param="format")

    @property
    def thinks(self) -> bool | None:
        return None if self.think is None else bool(self.think)

    @property
    def streams(self) -> bool:
        return self.stream is not False


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: dict[str, Any]
    index: int | None = None


class MessageToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(BaseModel):
    """tool_name, tool_call_id: which call a tool's message answers; Ollama's clients send one, or neither."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Unsupported = None
    thinking: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_template_message(self) -> dict[str, Any]:
        """As chat templates know it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            calls = [(call.id, call.function) for call in self.tool_calls]
            message["tool_calls"] = [
                {"id": name or new_id(), "type": "function", "function": {"name": f.name, "arguments": f.arguments}}
                for name, f in calls
            ]
        if self.tool_name:
            message["name"] = self.tool_name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


class OllamaFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"] | None = None
    function: OllamaFunction


class ChatBody(GenerationBody):
    """POST /api/chat. Without messages it only loads the model."""

    messages: list[Message] | None = None
    tools: list[OllamaTool] | None = None

    def prompt_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates know them."""
        return [message.as_template_message() for message in self.messages or []]

    def tool_use(self) -> Tools:
        """Raises InvalidRequestError that names the field."""
        given = [tool.function.model_dump(exclude_none=True) for tool in self.tools or []]
        return Tools(tuple(Function(**fields) for fields in given))


class GenerateBody(GenerationBody):
    """POST /api/generate. Without a prompt it only loads the model. raw: the prompt goes to the model as it is."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Unsupported = None
    template: Unsupported = None
    context: Unsupported = None
    images: Unsupported = None

    @model_validator(mode="after")
    def _raw_has_no_system(self) -> "GenerateBody":
        if self.raw and self.system:
            raise PydanticCustomError("raw", "system and raw exclude each other: write the system prompt into prompt")
        return self

    def tool_use(self) -> Tools:
        return Tools()

    def prompt_messages(self) -> list[dict[str, Any]]:
        """role and content as chat templates know them; none without a prompt."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}] if self.prompt else []


class ShowBody(BaseModel):
    """POST /api/show. name: what older clients call model."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: Unsupported = None
    template: Unsupported = None
    options: Unsupported = None
