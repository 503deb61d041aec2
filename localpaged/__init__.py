"""Local chat server and Python engine: several candidate answers at nearly the price of one.

Importing this imports nothing heavy; torch and the model code come with the first use of LLM.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]

if TYPE_CHECKING:
    from localpaged.engine.llm import LLM
    from localpaged.engine.sampling_params import SamplingParams
    from localpaged.engine.structured_outputs import StructuredOutputs


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from localpaged.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from localpaged.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputs":
        from localpaged.engine.structured_outputs import StructuredOutputs

        return StructuredOutputs
    raise AttributeError(f"module 'localpaged' has no attribute {name!r}")
