"""Request bodies of the Anthropic-compatible API, as strict as they are read.

A field or content block that is not known, or known and not supported, is refused by name. Fields that real clients
send and that change nothing here are accepted; INERT lists them.
Sources: https://platform.claude.com/docs/en/api/messages/create and .../messages/count_tokens.
"""

from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError
from localpaged.server.tools import Function, Tools
from localpaged.server.unsupported import Unsupported

# Everything that was computed once is reused, whether or not cache_control asks for it.
CALL_PREFIX = "toolu_"
INERT = ("metadata", "service_tier", "cache_control")


def _only_disabled(thinking: dict[str, Any] | None) -> dict[str, Any] | None:
    if thinking and thinking.get("type") != "disabled":
        raise PydanticCustomError("unsupported", "Not supported here: leave it out")
    return thinking


class TextBlock(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: Unsupported = None


class ThinkingBlock(BaseModel):
    """What an answer thought; templates leave it out of later turns, or know how to write it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None
    caller: Any = None


class ToolResultBlock(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(block.text for block in self.content)


BLOCKS = {"text", "thinking", "tool_use", "tool_result"}


def _known(blocks: Any) -> Any:
    """Blocks of other kinds are refused by their name."""
    for block in blocks if isinstance(blocks, list) else []:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in BLOCKS:
            raise PydanticCustomError("unsupported", "{kind} blocks are not supported here: send text", {"kind": kind})
    return blocks


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


def _kind(value: Any) -> str:
    return "blocks" if isinstance(value, list) else "string"


# The tag keeps pydantic from trying both, so that an error is about the one that was sent.
TextContent = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextBlock], BeforeValidator(_known), Tag("blocks")],
    Discriminator(_kind),
]
Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[Block], BeforeValidator(_known), Tag("blocks")],
    Discriminator(_kind),
]


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["user", "assistant"]
    content: Content

    @model_validator(mode="after")
    def _has_the_blocks_of_its_role(self) -> "Turn":
        wrong = ("tool_result",) if self.role == "assistant" else ("tool_use", "thinking")
        for block in self.blocks:
            if block.type in wrong:
                told = {"kind": block.type, "role": self.role}
                raise PydanticCustomError("role", "{kind} blocks do not belong to turns of the {role}", told)
        return self

    @property
    def blocks(self) -> list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else list(self.content)


class ClientTool(BaseModel):
    """A function of the client's. Anthropic's own tools (with other types) run nowhere here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool_where_it_asks_for_one(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("name", "name belongs to the type tool, and to no other")
        return self


class CountBody(BaseModel):
    """POST /v1/messages/count_tokens: what makes up a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    messages: list[Turn] = Field(min_length=1)
    system: TextContent = ""
    thinking: Annotated[dict[str, Any] | None, AfterValidator(_only_disabled)] = None
    cache_control: dict[str, Any] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    mcp_servers: Unsupported = None
    output_config: Unsupported = None
    output_format: Unsupported = None
    context_management: Unsupported = None

    def tool_use(self) -> Tools:
        """Raises InvalidRequestError that names the field."""
        choice = self.tool_choice or ToolChoice(type="auto")
        kinds: dict[str, str | tuple[str, str]] = {"any": "required", "tool": ("function", choice.name or "")}
        return Tools(
            functions=tuple(
                Function(tool.name, tool.description, tool.input_schema, bool(tool.strict)) for tool in self.tools or []
            ),
            choice=kinds.get(choice.type, choice.type),
            parallel=not choice.disable_parallel_tool_use,
        )

    def prompt_messages(self) -> tuple[list[dict[str, Any]], str]:
        """The messages as chat templates know them, and what of the answer is already there: a last assistant turn.

        Turns of one role that follow each other are one, as Anthropic has it.
        """
        system = self.system if isinstance(self.system, str) else "".join(block.text for block in self.system)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        names: dict[str, str] = {}
        for role, turns in groupby(self.messages, lambda turn: turn.role):
            texts, calls, thoughts = [], [], []
            for turn in turns:
                texts.append("".join(block.text for block in turn.blocks if isinstance(block, TextBlock)))
                for block in turn.blocks:
                    if isinstance(block, ToolUseBlock):
                        call_id = block.id.removeprefix(CALL_PREFIX)
                        names[call_id] = block.name
                        function = {"name": block.name, "arguments": block.input}
                        calls.append({"id": call_id, "type": "function", "function": function})
                    elif isinstance(block, ThinkingBlock):
                        thoughts.append(block.thinking)
                    elif isinstance(block, ToolResultBlock):
                        call_id = block.tool_use_id.removeprefix(CALL_PREFIX)
                        result = {"role": "tool", "content": block.text, "tool_call_id": call_id}
                        name = names.get(call_id)
                        messages.append(result if name is None else result | {"name": name})
            message: dict[str, Any] = {"role": role, "content": "\n".join(text for text in texts if text)}
            if thoughts:
                message["reasoning_content"] = "\n".join(thoughts)
            if calls:
                message["tool_calls"] = calls
            if message["content"] or calls or not messages or messages[-1]["role"] != "tool":
                messages.append(message)
        last = messages[-1]
        begun = messages.pop()["content"] if last["role"] == "assistant" and "tool_calls" not in last else ""
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

    def params(self, structured: StructuredOutputs | None = None) -> SamplingParams:
        """As the engine takes them. Raises InvalidRequestError that names the field."""
        if any(not text for text in self.stop_sequences or []):
            raise InvalidRequestError("stop_sequences has an empty string: leave it out.", "stop_sequences")
        names = ("temperature", "top_p", "top_k")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        stop = self.stop_sequences or []
        return SamplingParams(max_tokens=self.max_tokens, stop=stop, structured_outputs=structured, **values)
