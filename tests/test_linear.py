"""Linear layers and the compact weights of GGUF files against plain float32 products."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tolerances import EXACT, GROUPED, HALF

from localpaged.kernels.grouped_weight import GroupedWeight, grouped_from_gguf
from localpaged.kernels.linear import Linear, linear_reference

Q = GGMLQuantizationType
KINDS = [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K]
ROWS = [1, 2, 3, 8, 17, 65]
# Where a block keeps its float16 scales, in bytes from its beginning.
SCALES = {
    Q.Q4_0: [0],
    Q.Q4_1: [0, 2],
    Q.Q5_0: [0],
    Q.Q5_1: [0, 2],
    Q.Q8_0: [0],
    Q.Q4_K: [0, 2],
    Q.Q5_K: [0, 2],
    Q.Q6_K: [208],
}


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bytes are a valid block once its scales are numbers of a sane size."""
    rng = np.random.default_rng(seed)
    per_block, num_bytes = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // per_block, num_bytes), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = rng.uniform(-0.02, 0.02, data.shape[:2]).astype(np.float16)
        data[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def grouped(kind: GGMLQuantizationType, rows: int, columns: int) -> tuple[GroupedWeight, torch.Tensor]:
    data = random_blocks(kind, rows, columns)
    weight = grouped_from_gguf(data, kind, (rows, columns))
    assert weight is not None
    return weight, torch.from_numpy(gguf.quants.dequantize(data, kind).copy())


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_compact_form_is_exact(kind: GGMLQuantizationType) -> None:
    weight, expected = grouped(kind, 24, 512)
    assert relative(weight.dequantize(), expected) < 1e-6


def test_a_type_without_a_compact_form_has_none() -> None:
    assert grouped_from_gguf(np.zeros((2, 64), dtype=np.uint8), Q.F16, (2, 32)) is None


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("num_rows", ROWS)
def test_compact_weights_multiply_as_float32(kind: GGMLQuantizationType, num_rows: int) -> None:
    weight, expected = grouped(kind, 200, 512)
    bias = torch.randn(200)
    x = torch.randn(num_rows, 512) * torch.rand(num_rows, 1) * 10
    linear = Linear.pack(expected, bias, weight)
    assert linear.form == ("4-bit" if kind in (Q.Q4_1, Q.Q4_K) else "8-bit")
    assert relative(linear(x), linear_reference(x, expected, bias)) < GROUPED


def test_weights_of_different_types_are_stacked_without_rounding() -> None:
    # As in a Q4_K_M file: the queries' and keys' weights in Q4_K, the values' in Q6_K.
    parts = [grouped(kind, 48, 512) for kind in (Q.Q4_K, Q.Q6_K, Q.Q8_0)]
    stacked = GroupedWeight.concatenate([weight for weight, _ in parts])
    expected = torch.cat([matrix for _, matrix in parts])
    assert relative(stacked.dequantize(), expected) < 1e-6
    x = torch.randn(3, 512)
    assert relative(Linear.pack(expected, None, stacked)(x), linear_reference(x, expected)) < GROUPED


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", [(64, 48), (33, 128), (320, 576)])
def test_weights_without_a_compact_form_multiply_as_float16(num_rows: int, shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(num_rows, shape[1])
    assert relative(Linear.pack(weight, bias)(x), linear_reference(x, weight, bias)) < HALF
    assert relative(Linear.pack(weight)(x), linear_reference(x, weight)) < HALF


@pytest.mark.parametrize("num_rows", ROWS)
def test_exact_is_float32(num_rows: int) -> None:
    weight, bias, x = torch.randn(33, 128), torch.randn(33), torch.randn(num_rows, 128)
    linear = Linear.pack(weight, bias, exact=True)
    assert linear.form == "float32"
    assert relative(linear(x), linear_reference(x, weight, bias)) < EXACT


def test_rounding_is_multiplied_by_the_weight_and_not_by_its_positive_part() -> None:
    # As in real files: integers from 0 to 15, and a minimum that puts their middle at zero.
    torch.manual_seed(0)
    q = torch.randint(0, 16, (256, 512), dtype=torch.uint8)
    scale = torch.full((256, 16), 2.0**-6)
    weight = GroupedWeight(q, scale, scale * -7.5, 32)
    # One large value a group makes the others' rounding coarse.
    x = torch.randn(64, 512)
    x[:, ::32] *= 300
    exact = x.double() @ weight.dequantize().double().T
    error = (Linear.pack(weight.dequantize(), None, weight)(x) - exact).std()
    step = x.view(64, 16, 32).abs().amax(-1) / 32767
    expected = (step.square().sum(-1).mean() * 32 / 12).sqrt() * weight.dequantize().std()
    assert error < 1.2 * expected


def test_rows_do_not_depend_on_their_neighbours() -> None:
    weight, expected = grouped(Q.Q4_1, 64, 256)
    linear = Linear.pack(expected, None, weight)
    x = torch.randn(9, 256)
    alone = torch.cat([linear(row[None]) for row in x])
    assert relative(linear(x), alone) < 1e-6


def test_no_rows_give_no_rows_and_a_wrong_width_raises() -> None:
    linear = Linear.pack(torch.randn(8, 64))
    assert linear(torch.empty(0, 64)).shape == (0, 8)
    with pytest.raises(ValueError, match="does not fit"):
        linear(torch.randn(2, 63))
