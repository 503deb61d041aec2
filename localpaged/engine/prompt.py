"""What a request gives an engine to go on from: token ids, or text for an engine that keeps its tokenizer to itself."""

from typing import Any

import msgspec


class ChatPrompt(msgspec.Struct, frozen=True):
    """A conversation up to its next answer, of which begun is already written. messages: role and content."""

    messages: list[dict[str, Any]]
    begun: str = ""


# A text is completed as it is.
Prompt = list[int] | str | ChatPrompt
