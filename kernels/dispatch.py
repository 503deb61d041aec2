"""Which implementation of an operation runs: decided here and nowhere else.

Knows devices and batch sizes, not what the operations compute.
"""

from enum import Enum

from torch import Tensor


class Implementation(Enum):
    """How an operation is carried out."""

    REFERENCE = "reference"
    NUMBA = "numba"


def implementation_for(tensor: Tensor) -> Implementation:
    """The implementation for operations on this tensor's device and type."""
    return Implementation.REFERENCE
