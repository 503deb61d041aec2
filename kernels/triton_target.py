"""Facts about where Triton's kernels run that the kernels must know: the interpreter's limits, and the card's.

Only for files that import triton themselves.
"""

from functools import cache

import torch
import triton

# Whether kernels run in Triton's interpreter, on the CPU.
INTERPRETED: bool = triton.knobs.runtime.interpret
# The interpreter holds bfloat16 as bare bits and multiplies these in tl.dot (Triton 3.6 to 3.9); float16 is slow there.
CAST_BEFORE_DOT = INTERPRETED


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; 4 in the interpreter."""
    return 4 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def capability(device: torch.device) -> int:
    """90 for sm_90; of the interpreter too, whose memory is not limited."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
