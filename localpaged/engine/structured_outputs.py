"""What a request wants its answers to look like; names as in vLLM's structured outputs. guide.py sees to it."""

from typing import Any

import msgspec

from localpaged.errors import InvalidRequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What answers must look like; exactly one of KINDS. Raises InvalidRequestError for none or several.

    json: a JSON schema. json_object: any JSON object. regex: a regular expression that the whole answer matches.
    choice: one of these texts. grammar: a grammar in Lark's notation, as llguidance takes it.
    """

    json: dict[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    # The field that a request said it in, for what is told of errors.
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"{self.param} takes one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}.",
                self.param,
            )
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise InvalidRequestError(f"{self.param} has no choice, or an empty one.", self.param)
