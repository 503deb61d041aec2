"""A contiguous float32 row at an address, for numba kernels whose arrays have rows apart from one another.

numba's arrays of any layout index with a stride in the last dimension too, and LLVM vectorises no loop over them.
"""

from typing import Any

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic


@intrinsic
def _float_pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer to float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.FloatType().as_pointer())

    return types.CPointer(types.float32)(types.intp), codegen


@njit(cache=True)
def float_row(address, length):  # type: ignore[no-untyped-def]
    """float32 [length] at address."""
    return carray(_float_pointer(address), (length,))
