"""numpy views of tensors in the processor's memory, for numba kernels.

A step of one sequence through a small model makes some 250 kernel calls; what each spends on torch's side is
measured in microseconds that add up to more than the arithmetic.
"""

from typing import Any

import numpy as np
from torch import Tensor

Array = np.ndarray[Any, Any]


def lasting_array(tensor: Tensor) -> Array:
    """The view of a tensor that is used again and again, made once: weights, tables, caches, a step's batch.

    The tensor's memory must stay where it is.
    """
    array: Array | None = getattr(tensor, "_lasting_array", None)
    if array is None:
        array = tensor.numpy()
        tensor._lasting_array = array  # type: ignore[attr-defined]
    return array
