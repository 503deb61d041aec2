"""Request bodies of /v1/responses, as strict as they are read: text in, text out.

A field that is not known, or known and not supported, is refused by name; INERT lists those that change nothing.
Source: https://platform.openai.com/docs/api-reference/responses/create. top_k, min_p and seed are named as in vLLM.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError
from localpaged.server.openai_schema import JsonObjectFormat, TextFormat
from localpaged.server.unsupported import Unsupported
from localpaged.store.message import Role

INERT = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")


class InputText(BaseModel):
    """A part of a message. Those of answers bring their annotations and log-probabilities along."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[InputText], Tag("parts")],
        Discriminator(lambda value: "parts" if isinstance(value, list) else "string"),
    ]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class JsonSchemaText(BaseModel):
    """name and description are for people; strict is always so here."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaText, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_obfuscation: Literal[False] = False


class ResponsesBody(BaseModel):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[InputMessage], Tag("items")],
        Discriminator(lambda value: "items" if isinstance(value, list) else "string"),
    ]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    background: Unsupported = None
    include: Unsupported = None
    reasoning: Unsupported = None
    conversation: Unsupported = None
    prompt: Unsupported = None
    top_logprobs: Unsupported = None
    max_tool_calls: Unsupported = None
    context_management: Unsupported = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def keeps(self) -> bool:
        """As with OpenAI, an answer is stored unless that is declined."""
        return self.store is not False

    def messages(self) -> tuple[str, list[tuple[Role, str]]]:
        """(system prompt, the turns that are new as (role, text)), the last of them a user's.

        Raises InvalidRequestError.
        """
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else list(self.input)
        system = [self.instructions] if self.instructions else []
        while items and items[0].role in ("system", "developer"):
            system.append(items.pop(0).text)
        turns: list[tuple[Role, str]] = []
        for index, item in enumerate(items):
            if item.role == "user" or item.role == "assistant":
                turns.append((item.role, item.text))
            else:
                raise InvalidRequestError(
                    "Messages of the system come before all others: move them to the beginning, or to instructions.",
                    f"input.{index}.role",
                )
        if not items or items[-1].role != "user" or not items[-1].text.strip():
            raise InvalidRequestError("input must end with a message of the user that says something.", "input")
        return "\n\n".join(system), turns

    def params(self) -> SamplingParams:
        """As the engine takes them. Raises InvalidRequestError that names the field."""
        form = self.text.format if self.text is not None else None
        structured = None
        if isinstance(form, JsonSchemaText):
            structured = StructuredOutputs(json=form.schema_, param="text")
        elif isinstance(form, JsonObjectFormat):
            structured = StructuredOutputs(json_object=True, param="text")
        names = ("temperature", "top_p", "top_k", "min_p", "seed")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            return SamplingParams(max_tokens=self.max_output_tokens, structured_outputs=structured, **values)
        except InvalidRequestError as error:
            if error.param != "max_tokens":
                raise
            message = str(error).replace("max_tokens", "max_output_tokens")
            raise InvalidRequestError(message, "max_output_tokens") from error
