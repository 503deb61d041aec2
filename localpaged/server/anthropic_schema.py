"""Request bodies of the Anthropic-compatible API, as strict as they are read.

A field or content block that is not known, or known and not supported, is refused by name. Fields that real clients
send and that change nothing here are accepted; INERT lists them.
Sources: https://platform.claude.com/docs/en/api/messages/create and .../messages/count_tokens.
"""

from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from localpaged.engine.sampling_params import SamplingParams
from localpaged.errors import InvalidRequestError
from localpaged.server.unsupported import Unsupported

# Everything that was computed once is reused, whether or not cache_control asks for it.
INERT = ("metadata", "service_tier", "cache_control")


def _only_text(kind: str) -> str:
    if kind != "text":
        raise PydanticCustomError("unsupported", "{kind} blocks are not supported here: send text", {"kind": kind})
    return kind


def _only_disabled(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    if thinking and thinking.get("type") != "disabled":
        raise PydanticCustomError("unsupported", "Not supported here: leave it out")
    return thinking


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Annotated[str, AfterValidator(_only_text)]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: Unsupported = None


# The tag keeps pydantic from trying both, so that an error is about the one that was sent.
Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextBlock], Tag("blocks")],
    Discriminator(lambda value: "blocks" if isinstance(value, list) else "string"),
]


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["user", "assistant"]
    content: Content


class CountBody(BaseModel):
    """POST /v1/messages/count_tokens: what makes up a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: Content = ""
    thinking: Annotated[dict[str, Any] | None, AfterValidator(_only_disabled)] = None
    cache_control: dict[str, Any] | None = None
    tools: Unsupported = None
    tool_choice: Unsupported = None
    mcp_servers: Unsupported = None
    output_config: Unsupported = None
    output_format: Unsupported = None
    context_management: Unsupported = None

    def prompt_messages(self) -> tuple[list[dict[str, str]], str]:
        """The messages as chat templates know them, and what of the answer is already there: a last assistant turn.

        Turns of one role that follow each other are one, as Anthropic has it.
        """
        system = text_of(self.system)
        messages = [{"role": "system", "content": system}] if system else []
        for role, turns in groupby(self.messages, lambda turn: turn.role):
            messages.append({"role": role, "content": "\n".join(text_of(turn.content) for turn in turns)})
        begun = messages.pop()["content"] if self.messages[-1].role == "assistant" else ""
        return messages, begun


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Unsupported = None

    def params(self) -> SamplingParams:
        """As the engine takes them. Raises InvalidRequestError that names the field."""
        if any(not text for text in self.stop_sequences or []):
            raise InvalidRequestError("stop_sequences has an empty string: leave it out.", "stop_sequences")
        names = ("temperature", "top_p", "top_k")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(max_tokens=self.max_tokens, stop=self.stop_sequences or [], **values)
