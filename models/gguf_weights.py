"""A GGUF's tensors under transformers' names; dequantisation by the gguf package."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localpaged.errors import ModelError
from localpaged.kernels.grouped_weight import GroupedWeight, grouped_from_gguf
from localpaged.models.gguf_header import GgufHeader, TensorEntry
from localpaged.models.weights import Placement

# llama.cpp's converter interleaves the rows of these for its own rotary order.
INTERLEAVED = {"llama": {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}}


class GgufWeights:
    """A GGUF's tensors under transformers' names; see weights.Weights."""

    def __init__(self, path: Path, header: GgufHeader, config: Any, placement: Placement | None = None) -> None:
        import gguf

        self.placement = placement or Placement()
        architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
        self._names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
        self._header = header
        self._config = config
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
        # As many heads as a layer's rows are interleaved by, by the projection's name.
        self._heads = {part: getattr(config, count) for part, count in INTERLEAVED.get(header.architecture, {}).items()}

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        import gguf

        entry = self._entry(name)
        kind = gguf.GGMLQuantizationType[entry.type]
        values = gguf.quants.dequantize(self._raw(entry), kind).reshape(entry.shape)
        tensor = self._in_order(name, torch.from_numpy(np.array(values, dtype=np.float32)))
        return tensor.to(dtype or self.placement.dtype).to(self.placement.device)

    def grouped(self, name: str) -> GroupedWeight | None:
        import gguf

        if self.placement != Placement():
            return None
        entry = self._entry(name)
        kind = gguf.GGMLQuantizationType[entry.type]
        grouped = grouped_from_gguf(self._raw(entry), kind, (entry.shape[0], entry.shape[-1]))
        if grouped is None or self._num_heads(name) is None:
            return grouped
        minimum = None if grouped.minimum is None else self._in_order(name, grouped.minimum)
        return GroupedWeight(
            self._in_order(name, grouped.q), self._in_order(name, grouped.scale), minimum, grouped.group
        )

    def _find(self, name: str) -> TensorEntry | None:
        known = name if name in self._header.tensors else self._names.get_name(name, (".weight", ".bias"))
        return self._header.tensors.get(known) if known is not None else None

    def _entry(self, name: str) -> TensorEntry:
        entry = self._find(name)
        if entry is None:
            raise ModelError(f"The GGUF lacks {name}: it is incomplete. Fetch the model again.")
        return entry

    def _raw(self, entry: TensorEntry) -> np.ndarray:
        data = self._bytes[entry.offset : entry.offset + entry.num_bytes]
        if entry.type in ("F32", "F16"):
            data = data.view(np.float32 if entry.type == "F32" else np.float16)
        # Rows stay rows, whatever a block of the type holds.
        return data.reshape(*entry.shape[:-1], -1)

    def _num_heads(self, name: str) -> int | None:
        return next((heads for part, heads in self._heads.items() if f".{part}." in name), None)

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """Undo the interleaving: within a head, rows 0, 2, 4, ... then 1, 3, 5, ..."""
        heads = self._num_heads(name)
        if heads is None:
            return rows
        half = rows.shape[0] // heads // 2
        return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape).contiguous()
