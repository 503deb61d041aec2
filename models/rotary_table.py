"""The angles of the rotary embedding as tables of cosines and sines by position."""

from typing import Any

import torch
from torch import Tensor

from localpaged.models.decoder_config import RopeConfig


def rotary_table(
    rope: RopeConfig,
    num_positions: int,
    transformers_config: Any,
    frequency_divisors: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [num_positions, dim / 2] each on the device, with the attention factor in.

    The scalings (linear, dynamic, yarn, longrope, llama3) are those of transformers.modeling_rope_utils.
    frequency_divisors [dim / 2] are a GGUF's own rope_freqs, which stand in for a scaling.
    """
    kind = rope.parameters.get("rope_type", "default")
    factor = 1.0
    if kind == "default":
        exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
        frequencies = 1.0 / rope.parameters["rope_theta"] ** exponents
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        layer_type = None if rope.key == "default" else rope.key
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](
            transformers_config, torch.device("cpu"), seq_len=num_positions, layer_type=layer_type
        )
    if frequency_divisors is not None:
        frequencies = frequencies / frequency_divisors.cpu()
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
