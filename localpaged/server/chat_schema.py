"""Request bodies of the chat page's API; what it answers with is in native_schema.py."""

import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from localpaged.engine.sampling_params import SamplingParams

MAX_TEXT_CHARS = 2_000_000


class Body(BaseModel):
    """A request body; a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid")


class Sampling(Body):
    """The controls of the page. Values out of range are refused by SamplingParams."""

    n: int = Field(default=1, ge=1, le=8)
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 512
    seed: int | None = None

    def params(self) -> SamplingParams:
        """With a seed in any case, so that what is shown can be drawn again."""
        values = self.model_dump()
        if values["seed"] is None:
            values["seed"] = secrets.randbelow(10_000)
        return SamplingParams(**values)


class NewConversation(Body):
    title: str = Field(default="", max_length=300)
    system_prompt: str = Field(default="", max_length=MAX_TEXT_CHARS)
    settings: dict[str, Any] = {}


class ConversationChange(Body):
    title: str | None = Field(default=None, max_length=300)
    system_prompt: str | None = Field(default=None, max_length=MAX_TEXT_CHARS)
    settings: dict[str, Any] | None = None
    pinned: bool | None = None
    archived: bool | None = None


class NewMessage(Body):
    parent: int | None
    text: str = Field(max_length=MAX_TEXT_CHARS)
    sampling: Sampling = Sampling()


class Again(Body):
    sampling: Sampling = Sampling()


class StopSome(Body):
    candidates: list[int] | None = None


class MessageIds(Body):
    ids: list[int]


class Draft(Body):
    """A message that is being written; conversation is None before the first one is sent."""

    conversation: int | None = None
    parent: int | None = None
    text: str = Field(default="", max_length=MAX_TEXT_CHARS)
    system_prompt: str = Field(default="", max_length=MAX_TEXT_CHARS)
