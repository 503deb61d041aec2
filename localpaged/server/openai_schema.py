"""Request bodies of the OpenAI-compatible API, as strict as they are read.

A field that is not known or has a wrong type is refused by name. Fields that real clients send and that
change nothing here are accepted; INERT lists them.
Source: https://platform.openai.com/docs/api-reference/chat/create and .../completions/create; fields
beyond OpenAI's (top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, best_of for
chat) are named as in vLLM.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from localpaged.engine.sampling_params import LARGEST, SamplingParams
from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError
from localpaged.server.tools import Function, Tools

TokenId = Annotated[int, Field(ge=0, le=LARGEST)]
INERT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    # vLLM's: with include_usage, each chunk has the tokens of its choice so far.
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """name and description are for people; strict is always so here."""

    model_config = ConfigDict(extra="forbid")

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: NamedSchema


class StructuredBody(BaseModel):
    """vLLM's field: one of these."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def outputs(self) -> StructuredOutputs:
        return StructuredOutputs(
            json=self.json_,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )


class SamplingBody(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    n: int = 1
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int | None = None
    ignore_eos: bool = False
    use_beam_search: bool = False
    structured_outputs: StructuredBody | None = None
    length_penalty: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def sampling_params(
        self, max_tokens: int | None, logprobs: int | None, structured: StructuredOutputs | None = None
    ) -> SamplingParams:
        """As the engine takes them. Raises InvalidRequestError that names the field."""
        if self.best_of is not None and self.stream:
            raise InvalidRequestError("best_of is known only at the end: leave stream out.", "best_of")
        names = [
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
            "stop_token_ids",
            "min_tokens",
            "length_penalty",
            "best_of",
        ]
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.use_beam_search:
            values["beam_width"] = values.pop("best_of", None) or self.n
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=stop,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logit_bias=self._bias_by_id(),
            structured_outputs=structured,
            **values,
        )

    def _bias_by_id(self) -> dict[int, float]:
        try:
            return {int(token_id): bias for token_id, bias in (self.logit_bias or {}).items()}
        except ValueError as error:
            raise InvalidRequestError("logit_bias maps token ids (whole numbers) to biases.", "logit_bias") from error


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """With its arguments as an object, as chat templates want them; what is no JSON stays text."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> "ChatMessage":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "content is missing")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "tool_calls belong to messages of the assistant")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise PydanticCustomError("tool_call_id", "tool_call_id belongs to each message of a tool, and to no other")
        return self

    def as_template_message(self) -> dict[str, Any]:
        """As chat templates know it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionDefinition

    def as_function(self) -> Function:
        given = {name: value for name, value in self.function if value is not None}
        return Function(**given)


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: FunctionName


class TemplateSwitches(BaseModel):
    """vLLM's chat_template_kwargs, as far as it is a switch that templates share."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    chat_template_kwargs: TemplateSwitches | None = None

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None

    @property
    def think(self) -> bool | None:
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs is not None else None

    def tool_use(self) -> Tools:
        """Raises InvalidRequestError that names the field."""
        choice = self.tool_choice or "auto"
        return Tools(
            functions=tuple(tool.as_function() for tool in self.tools or []),
            choice=("function", choice.function.name) if isinstance(choice, NamedToolChoice) else choice,
            parallel=self.parallel_tool_calls is not False,
        )

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates know them. A tool's answer has its function's name, which some want."""
        messages = [message.as_template_message() for message in self.messages]
        names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", [])}
        return [
            message | {"name": names[message["tool_call_id"]]} if message.get("tool_call_id") in names else message
            for message in messages
        ]

    def params(self, tools: Tools, tags_calls: bool) -> SamplingParams:
        """tags_calls: the model writes calls between tags."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        structured = None
        if isinstance(self.response_format, JsonSchemaFormat):
            structured = StructuredOutputs(json=self.response_format.json_schema.schema_, param="response_format")
        elif isinstance(self.response_format, JsonObjectFormat):
            structured = StructuredOutputs(json_object=True, param="response_format")
        if self.structured_outputs is not None:
            if structured is not None:
                raise InvalidRequestError(
                    "response_format and structured_outputs exclude each other: give one.", "structured_outputs"
                )
            structured = self.structured_outputs.outputs()
        structured = tools.guide(structured, tags_calls)
        return self.sampling_params(limit, (self.top_logprobs or 0) if self.logprobs else None, structured)


class CompletionBody(SamplingBody):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: Literal[False] | None = None
    suffix: None = None

    def params(self) -> SamplingParams:
        structured = self.structured_outputs.outputs() if self.structured_outputs is not None else None
        return self.sampling_params(self.max_tokens, self.logprobs, structured)

    def prompts(self) -> list[str | list[int]]:
        """Each prompt on its own."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt is empty.", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)
