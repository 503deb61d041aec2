"""A request's field that is known and does nothing here: accepted while it asks for nothing, else refused by name."""

from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError


def _refuse(value: Any) -> None:
    # Real clients send null, false, 0, "" and empty lists for what they do not use.
    if value:
        raise PydanticCustomError("unsupported", "Not supported here: leave it out")


Unsupported = Annotated[Any, AfterValidator(_refuse)]
