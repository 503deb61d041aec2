"""Loads a model from a GGUF file or a transformers folder."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localpaged.errors import ModelError
from localpaged.models.chat_tokenizer import folder_eos_token_ids
from localpaged.models.decoder import Decoder
from localpaged.models.decoder_config import DecoderConfig
from localpaged.models.gguf_header import light_config, read_header
from localpaged.models.gguf_weights import GgufWeights
from localpaged.models.registry import decoder_config
from localpaged.models.weights import Placement, SafetensorsWeights, Weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's description and where its weights are; nothing large is read yet."""

    path: Path
    config: DecoderConfig
    weights: Weights
    transformers_config: Any

    def build(self, num_positions: int, exact: bool = False) -> Decoder:
        """Read the weights and build the decoder for positions below num_positions; exact: in float32 throughout."""
        return Decoder(self.config, self.weights, num_positions, self.transformers_config, exact)


def open_checkpoint(path: Path, placement: Placement | None = None) -> Checkpoint:
    """Describe the model at a path; its weights will go where placement says, to the CPU as float32 without it.

    Raises ModelError when it is missing, damaged or not supported.
    """
    placement = placement or Placement()
    if path.is_file():
        header = read_header(path)
        hf_config = light_config(header)
        return Checkpoint(path, decoder_config(hf_config), GgufWeights(path, header, hf_config, placement), hf_config)
    file = path / "config.json"
    if not file.exists():
        raise ModelError(
            f"{path} is no model: it is neither a GGUF file nor a folder with a config.json. "
            "`localpaged list` shows what is here."
        )
    from transformers import CONFIG_MAPPING

    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON ({error}). Fetch the model again.") from error
    values = values.get("text_config", values)
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"{file} names the architecture {model_type!r}, which is not known.")
    hf_config = CONFIG_MAPPING[model_type].from_dict(values)
    config = replace(decoder_config(hf_config), eos_token_ids=folder_eos_token_ids(path))
    return Checkpoint(path, config, SafetensorsWeights(path, placement), hf_config)
