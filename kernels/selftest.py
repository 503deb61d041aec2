"""Each operation once on small random input, against its reference: whether a machine can run it.

For `localpaged doctor`; the tests proper are in tests/.
"""

from collections.abc import Callable

import torch

from localpaged.kernels.linear import Linear, linear_reference
from localpaged.kernels.paged_attention import paged_attention, paged_attention_reference
from localpaged.kernels.prefill_attention import prefill_attention, prefill_attention_reference
from localpaged.kernels.rms_norm import rms_norm, rms_norm_reference
from localpaged.kernels.rotary import apply_rotary, apply_rotary_reference
from localpaged.kernels.swiglu import gated_activation, gated_activation_reference

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 64, 16


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).abs().max())


def _caches() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (12, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.randn(shape), torch.randn(shape)


def _decode_attention() -> float:
    tables = torch.tensor([[5, 2, 9], [5, 2, 7]], dtype=torch.int32)
    lens = torch.tensor([40, 37], dtype=torch.int32)
    groups = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    inputs = (torch.randn(2, HEADS, HEAD_DIM), *_caches(), tables, lens, *groups)
    reference = paged_attention_reference(*inputs[:-2], scale=0.125)
    return _difference(paged_attention(*inputs, scale=0.125), reference)


def _prefill_attention() -> float:
    tables = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    starts, lens = torch.tensor([0, 21], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    inputs = (torch.randn(21, HEADS, HEAD_DIM), *_caches(), tables, starts, lens)
    ours = prefill_attention(*inputs, scale=0.125, window=None, softcap=None)
    return _difference(ours, prefill_attention_reference(*inputs, scale=0.125, window=None, softcap=None))


def _linear() -> float:
    x, weight = torch.randn(3, 128) / 16, (torch.randn(64, 128) / 16).half().float()
    return _difference(Linear.pack(weight)(x), linear_reference(x, weight))


def _rms_norm() -> float:
    x, weight = torch.randn(5, 96), torch.randn(96)
    return _difference(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def _rotary() -> float:
    q, k = torch.randn(4, HEADS, HEAD_DIM), torch.randn(4, KV_HEADS, HEAD_DIM)
    angles = torch.rand(32, HEAD_DIM // 2) * 6
    inputs = angles.cos(), angles.sin(), torch.tensor([0, 3, 17, 31])
    reference = q.clone(), k.clone()
    apply_rotary(q, k, *inputs)
    apply_rotary_reference(*reference, *inputs)
    return max(_difference(q, reference[0]), _difference(k, reference[1]))


def _gated_activation() -> float:
    x = torch.randn(3, 128)
    return _difference(gated_activation(x, "silu"), gated_activation_reference(x, "silu"))


SELFTESTS: dict[str, Callable[[], float]] = {
    "decode attention": _decode_attention,
    "prefill attention": _prefill_attention,
    "linear": _linear,
    "rms norm": _rms_norm,
    "rotary": _rotary,
    "gated activation": _gated_activation,
}
