"""Parts what a model thinks from what it answers, as text comes in: <think> ... </think> at an answer's beginning.

Some templates open the tag themselves, so that an answer begins within it. Tags elsewhere are text like any other.
Source: the chat templates of Qwen3 and DeepSeek-R1; the field's name, reasoning_content, is DeepSeek's and vLLM's.
"""

from enum import Enum

OPEN, CLOSE = "<think>", "</think>"


class Part(Enum):
    UNDECIDED = "undecided"
    REASONING = "reasoning"
    # Between the closing tag and the first word after it.
    GAP = "gap"
    ANSWER = "answer"


class ReasoningSplitter:
    """One answer's text, piece by piece. begun: the prompt ends within a <think>."""

    def __init__(self, begun: bool = False) -> None:
        self._part = Part.GAP if begun else Part.UNDECIDED
        self._within = begun
        self._held = ""

    @property
    def within(self) -> bool:
        """Whether the text so far ends within what the model thinks."""
        return self._within

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) that a further piece brings; what may yet turn out to be a tag is held back."""
        self._held += text
        reasoning = answer = ""
        if self._part is Part.UNDECIDED:
            start = self._held.lstrip()
            if start.startswith(OPEN):
                self._held, self._within, self._part = start[len(OPEN) :], True, Part.GAP
            elif not OPEN.startswith(start):
                self._part = Part.ANSWER
        if self._part is Part.GAP:
            # The line breaks around the tags are nobody's.
            self._held = self._held.lstrip("\n")
            if self._held:
                self._part = Part.REASONING if self._within else Part.ANSWER
        if self._part is Part.REASONING:
            before, tag, after = self._held.partition(CLOSE)
            if tag:
                reasoning, self._held, self._within, self._part = before.rstrip("\n"), after, False, Part.GAP
                return reasoning, self.push("")[1]
            kept = _tail(self._held)
            reasoning, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        elif self._part is Part.ANSWER:
            answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """(reasoning, answer) of what was held back, at the answer's end."""
        held, self._held = self._held, ""
        return (held.rstrip("\n"), "") if self._within else ("", held)


def _tail(text: str) -> int:
    """Characters at the end that may belong to a closing tag, line breaks before it included."""
    for size in range(min(len(CLOSE) - 1, len(text)), 0, -1):
        if CLOSE.startswith(text[-size:]):
            break
    else:
        size = 0
    rest = text[: len(text) - size]
    return size + len(rest) - len(rest.rstrip("\n"))


def begins_within(prompt_end: str) -> bool:
    """Whether a prompt that ends with this text leaves the answer within a <think>."""
    return prompt_end.rstrip().endswith(OPEN)
