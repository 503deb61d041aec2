"""A GGUF file's header: what it says of the model, and where its tensors are.

Reading the header takes seconds, because the vocabulary is in it; what was read is kept under
LOCALPAGED_HOME/cache, keyed by the file's path, size and time, and a later start reads only that.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows nothing of torch.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from localpaged.errors import ModelError
from localpaged.home import cache_folder
from localpaged.models.gguf_tokenizer import build_tokenizer

FORMAT = 2
MAGIC = b"GGUF"
READABLE_TYPES = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor is. shape is in torch's order; offset and num_bytes within the file."""

    type: str
    shape: list[int]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file's header says, without the vocabulary, which is in folder/tokenizer.json."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    folder: Path

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def name(self) -> str:
        return str(self.metadata.get("general.name", ""))


def read_header(path: Path) -> GgufHeader:
    """Read a file's header, from the cache where it has been read before.

    Raises ModelError for a file that is missing, no GGUF, truncated, or of an unsupported kind.
    """
    try:
        status = path.stat()
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    if magic != MAGIC:
        raise ModelError(f"{path} is not a GGUF file (it begins with {magic!r}). Fetch the model again.")
    identity = f"{FORMAT}:{path.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    folder = cache_folder() / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    known = folder / "header.json"
    content = json.loads(known.read_text()) if known.exists() else _parse(path, folder)
    header = GgufHeader(
        content["metadata"],
        {name: TensorEntry(**entry) for name, entry in content["tensors"].items()},
        folder,
    )
    _check(path, header, status.st_size)
    return header


def _parse(path: Path, folder: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: TensorEntry(
                tensor.tensor_type.name,
                [int(size) for size in reversed(tensor.shape)],
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelError(f"{path} is damaged or truncated ({error}). Fetch the model again.") from error
    vocabulary = {name: value for name, value in fields.items() if isinstance(value, list) and "tokenizer" in name}
    metadata = {name: value for name, value in fields.items() if name not in vocabulary}
    tokens = vocabulary.get("tokenizer.ggml.tokens", [])
    metadata["vocab_size"] = len(tokens)
    types = vocabulary.get("tokenizer.ggml.token_type", [])
    metadata["end_of_turn_ids"] = [
        index for index, token in enumerate(tokens) if token in END_OF_TURN and types and types[index] == 3
    ]
    for kind in ("bos", "eos", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{kind}_token_id")
        metadata[f"{kind}_token"] = tokens[token_id] if token_id is not None and token_id < len(tokens) else None
    content = {"metadata": metadata, "tensors": {name: asdict(entry) for name, entry in tensors.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(fields, path)
    tokenizer.save(str(folder / "tokenizer.json"))
    written = folder / f"header.{os.getpid()}.json"
    written.write_text(json.dumps(content))
    # Last, and at once: a start that was interrupted leaves no header behind.
    written.replace(folder / "header.json")
    return content


def _check(path: Path, header: GgufHeader, num_bytes: int) -> None:
    if header.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path.name} has the architecture {header.architecture!r}, which is not supported as GGUF. "
            f"These are: {', '.join(ARCHITECTURES)}. Choose a model of one of them."
        )
    for name, entry in header.tensors.items():
        if entry.offset + entry.num_bytes > num_bytes:
            raise ModelError(
                f"{path} is truncated: it has {num_bytes:,} bytes and {name} ends at "
                f"{entry.offset + entry.num_bytes:,}. Fetch the model again."
            )
        if entry.type not in READABLE_TYPES:
            raise ModelError(
                f"{path.name} stores {name} as {entry.type}, which is not supported. "
                f"Choose a file quantised as one of {', '.join(sorted(READABLE_TYPES))}."
            )


def transformers_config(header: GgufHeader) -> Any:
    """The file's metadata as a transformers PretrainedConfig."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[ARCHITECTURES[header.architecture]](**_config_values(header))


def light_config(header: GgufHeader) -> Any:
    """The same, without transformers' model code, whose import takes longer than loading a small model.

    Only where that code is not needed for a rotary scaling.
    """
    values = _config_values(header)
    if values["rope_parameters"]["rope_type"] != "default":
        return transformers_config(header)
    fixed = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "layer_types": None}
    return SimpleNamespace(model_type=ARCHITECTURES[header.architecture], **fixed, **values)


def _config_values(header: GgufHeader) -> dict[str, Any]:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = header.architecture
    values: dict[str, Any] = {}
    for key, name in GGUF_CONFIG_MAPPING[architecture].items():
        value = header.metadata.get(f"{architecture}.{key}")
        if name is not None and value is not None:
            values[name] = value
    values.setdefault("vocab_size", header.metadata["vocab_size"])
    theta = values.pop("rope_theta", 10000.0)
    head_dim = header.metadata.get(f"{architecture}.attention.key_length")
    if head_dim is not None:
        values["head_dim"] = head_dim
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": theta} | _rope_scaling(header)
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    eos = header.metadata.get("tokenizer.ggml.eos_token_id")
    values["eos_token_id"] = sorted({*header.metadata["end_of_turn_ids"], *([] if eos is None else [eos])})
    return values


def _rope_scaling(header: GgufHeader) -> dict[str, Any]:
    prefix = f"{header.architecture}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"The rotary scaling {kind!r} of this GGUF is not supported; linear and yarn are.")
    scaling = {"rope_type": kind, "factor": header.metadata[f"{prefix}.factor"]}
    original = header.metadata.get(f"{prefix}.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})
