"""What a request says of tools: the functions, whether one must be called, and what that asks of the answers.

Where a call is required, or a function is strict, a grammar sees to it that names and arguments are right.
Sources: https://platform.openai.com/docs/guides/function-calling, https://github.com/guidance-ai/llguidance.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import InvalidRequestError
from localpaged.server.tool_calls import ToolCallParser

MAX_CALLS = 16
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# Without a bound a small model may go on with blanks for ever.
WHITESPACE = {"x-guidance": {"whitespace_pattern": r"[ \n]{0,12}"}}


NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """parameters: the JSON schema of its arguments, of which there are none where it is left out, as OpenAI has it.

    strict: they must follow it wherever it is called.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: dict(NO_ARGUMENTS))
    strict: bool = False

    def as_tool(self) -> dict[str, Any]:
        """As chat templates take it."""
        description = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **description, "parameters": self.parameters}}


@dataclass(frozen=True, slots=True)
class Tools:
    """choice: "none", "auto", "required", or ("function", its name). parallel: more than one call at once may be."""

    functions: tuple[Function, ...] = ()
    choice: str | tuple[str, str] = "auto"
    parallel: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidRequestError that names the field."""
        for name, count in Counter(function.name for function in self.functions).items():
            if count > 1 or not NAME.fullmatch(name):
                wrong = "is there twice" if count > 1 else "is no name"
                raise InvalidRequestError(
                    f"tools: the function {name!r} {wrong}. Each needs a name of its own, of up to 64 letters, "
                    "digits, _ and -.",
                    "tools",
                )
        if self.choice not in ("none", "auto") and not self.callable:
            known = ", ".join(function.name for function in self.functions)
            remedy = f"Name one of {known}." if known else "Give the functions in tools."
            raise InvalidRequestError(f"tool_choice asks for a function that is not in tools. {remedy}", "tool_choice")

    @property
    def callable(self) -> tuple[Function, ...]:
        """The functions that an answer may call."""
        if self.choice == "none":
            return ()
        if isinstance(self.choice, tuple):
            return tuple(function for function in self.functions if function.name == self.choice[1])
        return self.functions

    @property
    def required(self) -> bool:
        return self.choice == "required" or isinstance(self.choice, tuple)

    def for_template(self) -> list[dict[str, Any]] | None:
        """None where none may be called, so that the model does not try."""
        return [function.as_tool() for function in self.functions] if self.callable else None

    def parser(self) -> ToolCallParser | None:
        """A parser for one answer."""
        if not self.callable:
            return None
        single = not self.parallel or isinstance(self.choice, tuple)
        return ToolCallParser([function.name for function in self.callable], 1 if single else None)

    def guide(self, wanted: StructuredOutputs | None, tags_calls: bool) -> StructuredOutputs | None:
        """What answers must look like, given what else is wanted of them. tags_calls: the model writes <tool_call>.

        Raises InvalidRequestError for what does not go together.
        """
        if not self.callable:
            return wanted
        rules = _rules(self.callable)
        if self.required:
            if wanted is not None:
                raise InvalidRequestError(
                    f"tool_choice asks for a call and {wanted.param} for an answer: leave one out.", "tool_choice"
                )
            more = "" if isinstance(self.choice, tuple) or not self.parallel else f' (", " call){{0,{MAX_CALLS - 1}}}'
            return StructuredOutputs(grammar=f'start: "[" call{more} "]"\n{rules}', param="tools")
        strict = any(function.strict for function in self.callable)
        if wanted is None and not strict:
            return None
        if not tags_calls:
            what = "strict" if wanted is None else wanted.param
            raise InvalidRequestError(
                f"With this model's way of calling functions {what} needs tool_choice to be required or a function's "
                "name.",
                "tools" if wanted is None else wanted.param,
            )
        if wanted is None:
            return StructuredOutputs(grammar=f"{TEXT_AND_CALLS}\n{rules}", param="tools")
        if wanted.json is None and not wanted.json_object:
            raise InvalidRequestError(
                f"Beside tools {wanted.param} can only ask for JSON. Leave the tools out, or say it in a JSON schema.",
                wanted.param,
            )
        schema = wanted.json if wanted.json is not None else {"type": "object"}
        answer = f"answer: %json {json.dumps(schema | WHITESPACE)}"
        return StructuredOutputs(grammar=f"{ANSWER_OR_CALLS}\n{answer}\n{rules}", param=wanted.param)


TEXT_AND_CALLS = r"""start: (before call after)* TEXT
before[lazy]: /(?s:.*)<tool_call>/
after: /[ \n]{0,4}<\/tool_call>/
TEXT: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/"""
ANSWER_OR_CALLS = r"""start: answer | (before call after)+
before: /[ \n]{0,4}<tool_call>/
after: /[ \n]{0,4}<\/tool_call>/"""


def _rules(functions: tuple[Function, ...]) -> str:
    """The rule `call`: a JSON object with a function's name and arguments that follow its schema."""
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        beginning = re.escape(json.dumps({"name": function.name})[:-1]).replace("/", r"\/").replace(r"\ ", " ")
        lines.append(f'call_{i}: /[ \\n]{{0,2}}{beginning}, "arguments": / args_{i} "}}"')
        lines.append(f"args_{i}: %json {json.dumps(function.parameters | WHITESPACE)}")
    return "\n".join(lines)
