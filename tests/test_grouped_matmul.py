"""Integer products over grouped weights where the shapes, or the activations, are awkward."""

import pytest
import torch
from tolerances import GROUPED

from localpaged.kernels.grouped_matmul import grouped_matmul, grouped_matmul_reference, pack_weight
from localpaged.kernels.grouped_weight import GroupedWeight


def weight(num_rows: int, num_columns: int, bits: int = 4, group: int = 32) -> GroupedWeight:
    """Random weights; 4 and 5 bits have minima, 8 bits have none."""
    low, high = (0, 1 << bits) if bits < 8 else (-128, 128)
    shape = (num_rows, num_columns // group)
    scale, minimum = ((torch.randn(shape) * 0.05).half().float() for _ in range(2))
    q = torch.randint(low, high, (num_rows, num_columns)).to(torch.int8)
    return GroupedWeight(q, scale, minimum if bits < 8 else None, group)


def check(x: torch.Tensor, matrix: GroupedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    packed = pack_weight(matrix, bias)
    assert packed is not None
    out, expected = grouped_matmul(x, packed), grouped_matmul_reference(x, matrix, bias)
    assert out.shape == expected.shape
    assert (out - expected).abs().max() <= GROUPED * expected.abs().max()
    return out


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 15, 16, 17, 33])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 32), (8, 32), (8, 16)])
def test_each_tile_height_and_form_of_weight(num_rows: int, bits: int, group: int) -> None:
    check(torch.randn(num_rows, 96), weight(48, 96, bits, group))


@pytest.mark.parametrize("num_outputs", [1, 15, 17, 40])
def test_outputs_that_are_not_whole_panels(num_outputs: int) -> None:
    check(torch.randn(3, 64), weight(num_outputs, 64), torch.randn(num_outputs))


def test_an_outlier_costs_precision_in_its_own_group_only() -> None:
    """What the other groups give is the same, within the tolerance of their own sum, with the outlier there."""
    matrix = weight(32, 96)
    matrix.q[:, :32] = 0
    assert matrix.minimum is not None
    matrix.minimum[:, 0] = 0
    x = torch.randn(2, 96)
    x[0, 5] = 3e4
    check(x, matrix)


def test_what_rounding_leaves_of_a_large_group_is_multiplied_too() -> None:
    """Without it a group with a peak of 3e4 would be off by about 3e4 / 2^16, times the weight, for each column."""
    matrix = weight(32, 320, 8)
    x = torch.randn(2, 320)
    x[1, 5] = 3e4
    packed = pack_weight(matrix)
    assert packed is not None
    exact = x.double() @ matrix.dequantize().double().T
    error = (grouped_matmul(x, packed) - exact).abs().max(1).values / exact.abs().max(1).values
    assert error[1] < 1e-6


def test_tiny_and_zero_activations() -> None:
    matrix = weight(32, 64, 8)
    assert torch.equal(check(torch.zeros(2, 64), matrix), torch.zeros(2, 32))
    check(torch.randn(2, 64) * 1e-20, matrix)


def test_rows_that_lie_apart_in_memory() -> None:
    check(torch.randn(5, 100)[:, :64], weight(32, 64))


@pytest.mark.parametrize("num_rows", [20, 70])
def test_a_row_gives_the_same_whatever_its_neighbours(num_rows: int) -> None:
    """To the bit: whether a group is rounded in two steps depends on the row alone."""
    packed = pack_weight(weight(48, 320))
    assert packed is not None
    x = torch.randn(num_rows, 320)
    x[::7, 40] = 50.0
    together = grouped_matmul(x, packed)
    for row in (0, 5, 7, num_rows - 1):
        assert torch.equal(grouped_matmul(x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("num_rows", [1, 33])
def test_scales_that_float16_would_round_are_kept_whole(num_rows: int) -> None:
    matrix = weight(16, 96)
    finer = GroupedWeight(matrix.q, matrix.scale * 1.0001, matrix.minimum, 32)
    packed = pack_weight(finer)
    assert packed is not None and packed.scale_bits == 32
    check(torch.randn(num_rows, 96), finer)
