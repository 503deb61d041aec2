"""How far an implementation may be from its reference, by what it computes in."""

import torch

ATTENTION = 2e-5
# Queries, keys, weights and values rounded to 16-bit integers.
INTEGER_ATTENTION = 1e-3
ELEMENTWISE = 1e-5
# Relative to the largest output: activations in 16-bit integers, weights exact.
GROUPED = 2e-4
# Weights rounded to float16, relative to the largest output.
HALF = 2e-3
EXACT = 1e-5
# Triton kernels by the type of their inputs: weights and results are rounded to it, sums are float32.
TRITON = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
