"""Which implementation of an operation runs: decided here and nowhere else.

Knows devices and types, not what the operations compute.
"""

from enum import Enum

import numba
import torch
from torch import Tensor

# OpenMP alternates with torch's own threads without loss; numba's workqueue does not.
numba.config.THREADING_LAYER = "omp"

# Elementwise kernels split more rows than this between threads; starting them costs about 3 us.
SERIAL_ROWS = 16


class Implementation(Enum):
    """How an operation is carried out."""

    REFERENCE = "reference"
    NUMBA = "numba"
    TRITON = "triton"


# Tests set this to run the Triton kernels on the CPU, in Triton's interpreter.
triton_on_cpu = False


class LinearForm(Enum):
    """How a linear layer's weight is held and multiplied."""

    # As it is, by torch.
    DENSE = "dense"
    # Grouped integers times int16 where the weight has that form, else float16 weights with float32 sums.
    GROUPED_OR_HALF = "grouped or half"


def implementation_for(tensor: Tensor) -> Implementation:
    """The implementation for operations on this tensor's device and type."""
    if tensor.is_cuda or triton_on_cpu:
        return Implementation.TRITON
    if tensor.is_cpu and tensor.dtype is torch.float32:
        return Implementation.NUMBA
    return Implementation.REFERENCE


def linear_form(weight: Tensor, exact: bool = False) -> LinearForm:
    """The form for this weight; exact asks for float32 throughout.

    Measured on two cores, all layers of a 135M model, ms for 1 / 8 / 64 / 512 rows. Zen 3 (AVX2): 4-bit grouped
    8 / 17 / 82 / 780, float16 15 / 21 / 111 / 770, dense float32 36 / 70 / 180 / 860. On Zen 4 (AVX-512 VNNI)
    grouped took 0.6 of the time of float16 for 2,000 rows too. So one form serves whatever the number of rows, and
    nothing needs to be held twice; its error is an eighth of that of float16 weights (README, "Accuracy").
    """
    on_cpu = weight.device.type == "cpu" and not triton_on_cpu
    return LinearForm.GROUPED_OR_HALF if on_cpu and not exact else LinearForm.DENSE
