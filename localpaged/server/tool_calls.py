"""Finds calls of tools in an answer's text as it comes in, in the forms that models are trained to write them.

Between tags, anywhere in the answer:
  <tool_call>{"name": ..., "arguments": {...}}</tool_call>, also with a list in it   Hermes, Qwen, SmolLM
  <tool_call><function=name><parameter=key>value</parameter></function></tool_call>  Qwen3-Coder
  <function=name>{...}</function>                                                     Llama 3.1
  <｜tool▁calls▁begin｜> ... <｜tool▁calls▁end｜>                                          DeepSeek
As the whole answer:
  {"name": ..., "parameters": {...}}, several of them parted by ";"                   Llama 3
  [{"name": ..., "arguments": {...}}, ...]                                            Mistral, and where one is required
  name{...}, name[ARGS]{...}                                                          Mistral
  [name(key=value), ...]                                                              Llama 3.2 and 4
Names of special tokens (<|python_tag|>, [TOOL_CALLS]) are not in an answer's text, and are allowed for. What only
looks like a call stays text. Knows nothing of how an API writes calls.
Sources: the models' chat templates; https://docs.vllm.ai/en/latest/features/tool_calling.html for their number.
"""

import ast
import json
import re
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

TAGS = {
    "<tool_call>": "</tool_call>",
    "<function=": "</function>",
    "<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>",
}
LONGEST_TAG = max(map(len, TAGS))
# Mistral's templates refuse ids of any other form.
ID_LENGTH = 9
ALPHABET = string.ascii_letters + string.digits
MARKERS = ("[TOOL_CALLS]", "<|python_tag|>")
# The first key of an object that is a call.
FIRST_KEYS = ("name", "type", "function", "id", "arguments", "parameters")


def new_id() -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: JSON of an object, as the model wrote it."""

    name: str
    arguments: str
    id: str = field(default_factory=new_id)


class ToolCallParser:
    """One answer's text, piece by piece. calls: those found so far."""

    def __init__(self, names: list[str], most: int | None = None) -> None:
        """names: of the functions that may be called. most: calls beyond that many are left out."""
        self._names = names
        self._most = most
        self._held = ""
        self._blanks = ""
        # Whether it is settled that the answer is more than calls alone.
        self._begun = False
        self.calls: list[ToolCall] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """(text, calls) that a further piece brings; what may yet turn out to be a call is held back."""
        self._held += text
        if not self._begun:
            if self._may_be_whole_call(self._held):
                return "", []
            self._begun = True
        return self._tagged()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(text, calls) of what was held back, at the answer's end."""
        text, found = self._tagged() if self._begun else ("", [])
        held, self._held = self._held, ""
        opened = _first_tag(held)
        if not self._begun:
            calls = self._whole_calls(held)
        else:
            # An answer may end without the tag that closes it, where that is a token that ends answers.
            calls = self._calls_in(held, opened[1]) if opened is not None else []
        if calls:
            return text, found + self._take(calls)
        # Blanks beside calls are nobody's.
        rest = (self._blanks + held).rstrip() if self.calls else self._blanks + held
        return text + rest, found

    def _take(self, calls: list[ToolCall]) -> list[ToolCall]:
        room = len(calls) if self._most is None else max(self._most - len(self.calls), 0)
        self.calls += calls[:room]
        self._blanks = ""
        return calls[:room]

    def _say(self, text: str) -> str:
        """The text without the blanks at its end, which wait for what follows."""
        text = self._blanks + text
        said = text.rstrip()
        self._blanks = text[len(said) :]
        return said

    def _tagged(self) -> tuple[str, list[ToolCall]]:
        text = ""
        found: list[ToolCall] = []
        while (opened := _first_tag(self._held)) is not None:
            start, tag = opened
            end = self._held.find(TAGS[tag], start)
            if end < 0:
                break
            end += len(TAGS[tag])
            calls = self._calls_in(self._held[start:end], tag)
            text += self._say(self._held[: start if calls else end])
            if calls:
                found += self._take(calls)
            self._held = self._held[end:]
        sayable = opened[0] if opened is not None else len(self._held) - _possible_tag(self._held)
        text += self._say(self._held[:sayable])
        self._held = self._held[sayable:]
        return text, found

    def _calls_in(self, section: str, tag: str) -> list[ToolCall]:
        """The calls of a section from its opening tag on; none where it is not what the tag promises."""
        body = section.removesuffix(TAGS[tag])
        if tag == "<function=":
            match = re.fullmatch(r"<function=([^>\s]+)>\s*(.*?)\s*", body, re.DOTALL)
            return _checked([(match[1], _loads(match[2]))]) if match else []
        body = body[len(tag) :].strip()
        if tag != "<tool_call>":
            return _checked([(name, _loads(arguments)) for name, arguments in DEEPSEEK_CALL.findall(body)])
        if body.startswith("<function="):
            return _checked([_xml_call(match) for match in re.finditer(XML_FUNCTION, body)])
        return _checked(_json_calls(body))

    def _may_be_whole_call(self, text: str) -> bool:
        """Whether an answer that begins so may be calls from its first to its last character."""
        start = _unmarked(text)
        if not start or any(marker.startswith(start) for marker in MARKERS):
            return True
        if start[0] in "[{":
            inner = start.lstrip("[{ \n\t")
            if not inner:
                return True
            keys = [f'"{key}"' for key in FIRST_KEYS]
            heads = keys if "{" in start[: len(start) - len(inner)] else [f"{name}(" for name in self._names]
            return any(inner.startswith(head) or head.startswith(inner) for head in heads)
        heads = [head for name in self._names for head in (f"{name}{{", f"{name}[ARGS]", f"{name} {{")]
        return any(start.startswith(head) or head.startswith(start) for head in heads)

    def _whole_calls(self, text: str) -> list[ToolCall]:
        body = _unmarked(text).strip()
        if body.startswith("[") and not re.match(r"\[\s*\{", body):
            found = _python_calls(body)
        elif body.startswith(("{", "[")):
            found = _json_calls(body)
        else:
            found = _named_calls(body)
        calls = _checked(found)
        # Nothing but its name tells such text from an answer in JSON.
        return calls if all(call.name in self._names for call in calls) else []


DEEPSEEK_CALL = re.compile(
    r"<｜tool▁sep｜>(\S+)\s*(?:```json)?\s*(\{.*?\})\s*(?:```)?\s*<｜tool▁call▁end｜>", re.DOTALL
)
NAMED_CALL = re.compile(r"\s*(?:\[TOOL_CALLS\])?([\w-]+)(?:\[ARGS\])?\s*(?=\{)")
XML_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
Found = tuple[Any, Any]


def _first_tag(text: str) -> tuple[int, str] | None:
    places = [(text.find(tag), tag) for tag in TAGS if tag in text]
    return min(places) if places else None


def _possible_tag(text: str) -> int:
    """Characters at the end that may become an opening tag."""
    for size in range(min(LONGEST_TAG - 1, len(text)), 0, -1):
        if any(tag.startswith(text[-size:]) for tag in TAGS):
            return size
    return 0


def _unmarked(text: str) -> str:
    start = text.lstrip()
    for marker in MARKERS:
        start = start.removeprefix(marker).lstrip()
    return start


def _checked(found: list[Found]) -> list[ToolCall]:
    """The calls, or none where one of them is not a name with an object of arguments."""
    if not all(isinstance(name, str) and name and isinstance(arguments, dict) for name, arguments in found):
        return []
    return [ToolCall(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in found]


def _loads(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return None


def _json_calls(text: str) -> list[Found]:
    """Objects one after the other, or lists of them."""
    decoder = json.JSONDecoder()
    found: list[Found] = []
    place = 0
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            return [(None, None)]
        found += [_json_call(one) for one in (value if isinstance(value, list) else [value])]
        place += len(text[place:]) - len(text[place:].lstrip(" \n\t;,"))
    return found


def _json_call(value: Any) -> Found:
    if not isinstance(value, dict):
        return None, None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = value.get("name", inner if isinstance(inner, str) else None)
    arguments = value.get("arguments", value.get("parameters", {}))
    # Some write the arguments as JSON within JSON.
    return name, _loads(arguments) if isinstance(arguments, str) else arguments


def _named_calls(text: str) -> list[Found]:
    """name{...} and name[ARGS]{...}, one after the other."""
    decoder = json.JSONDecoder()
    found: list[Found] = []
    place = 0
    while match := NAMED_CALL.match(text, place):
        try:
            arguments, place = decoder.raw_decode(text, match.end())
        except ValueError:
            return []
        found.append((match[1], arguments))
    return found if not text[place:].strip() else []


def _python_calls(text: str) -> list[Found]:
    """[name(key=value), ...] with values that are literals."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return []
        found: list[Found] = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
                return []
            found.append((node.func.id, {str(word.arg): ast.literal_eval(word.value) for word in node.keywords}))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    try:
        json.dumps(found)
    except (TypeError, ValueError):
        return []
    return found


def _xml_call(match: "re.Match[str]") -> Found:
    """Values are JSON where they can be read so, and text otherwise."""
    arguments: dict[str, Any] = {}
    for name, value in re.findall(XML_PARAMETER, match[2]):
        parsed = _loads(value) if value else ""
        arguments[name] = value if parsed is None and value.strip() != "null" else parsed
    return match[1], arguments
