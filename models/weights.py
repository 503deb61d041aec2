"""Where a decoder's weights come from: one interface, under transformers' tensor names."""

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from localpaged.errors import ModelError
from localpaged.kernels.grouped_weight import GroupedWeight


class Placement(NamedTuple):
    """Where weights go, and as what."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32


class Weights(Protocol):
    """Tensors by transformers' names ("model.layers.0.self_attn.q_proj.weight")."""

    placement: Placement

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor, placed; in another type than the placement's with dtype. Raises ModelError when it is missing."""
        ...

    def grouped(self, name: str) -> GroupedWeight | None:
        """The tensor's exact compact form where the file has one and the processor multiplies it."""
        ...


class SafetensorsWeights:
    """A transformers folder: model.safetensors, or the shards of model.safetensors.index.json."""

    def __init__(self, folder: Path, placement: Placement | None = None) -> None:
        self.placement = placement or Placement()
        index = folder / "model.safetensors.index.json"
        if index.exists():
            names = json.loads(index.read_text())["weight_map"]
            files = sorted(set(names.values()))
        else:
            files = [path.name for path in sorted(folder.glob("*.safetensors"))]
        if not files:
            raise ModelError(f"{folder} has no .safetensors file. Fetch the model again: localpaged pull NAME.")
        self._file_by_name: dict[str, Any] = {}
        for file in files:
            handle = _open(folder / file, self.placement.device)
            self._file_by_name |= dict.fromkeys(handle.keys(), handle)

    def has(self, name: str) -> bool:
        return name in self._file_by_name

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self._file_by_name:
            raise ModelError(f"The checkpoint lacks {name}: it is incomplete. Fetch the model again.")
        tensor = self._file_by_name[name].get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(
                f"{name} is stored as {tensor.dtype}: quantised safetensors are not supported. "
                "Choose the float16, bfloat16 or float32 checkpoint, or a GGUF."
            )
        return tensor.to(dtype or self.placement.dtype)

    def grouped(self, name: str) -> GroupedWeight | None:
        return None


def _open(path: Path, device: torch.device) -> Any:
    if not path.exists():
        raise ModelError(f"{path} is missing: the model is incomplete. Fetch it again.")
    try:
        return safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ModelError(f"{path} is damaged or truncated ({error}). Fetch the model again.") from error
