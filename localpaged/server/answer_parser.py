"""Parts what a model thinks, says and calls, as an answer's text comes in. Knows nothing of how an API writes them."""

from dataclasses import dataclass, field

from localpaged.server.reasoning import ReasoningSplitter
from localpaged.server.tool_calls import ToolCall
from localpaged.server.tools import Tools


@dataclass(slots=True)
class Part:
    """What a piece of an answer brings."""

    reasoning: str = ""
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


class AnswerParser:
    """One answer. thinks: it begins within what the model thinks."""

    def __init__(self, tools: Tools, thinks: bool) -> None:
        self._splitter = ReasoningSplitter(thinks)
        self._parser = tools.parser()
        self.whole = Part()

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within what the model thinks."""
        return self._splitter.within

    def take(self, piece: str, ended: bool) -> Part:
        """What a further piece brings; with the last one comes what was held back."""
        reasoning, text = self._splitter.push(piece)
        if ended:
            rest = self._splitter.finish()
            reasoning, text = reasoning + rest[0], text + rest[1]
        calls: list[ToolCall] = []
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if ended:
                rest_text, rest_calls = self._parser.finish()
                text, calls = text + rest_text, calls + rest_calls
        self.whole.reasoning += reasoning
        self.whole.text += text
        self.whole.calls += calls
        return Part(reasoning, text, calls)
