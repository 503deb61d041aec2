"""Tiny random models of each architecture, as transformers makes them, saved the way people get them."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": None},
    "mistral window": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3_text": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1},
}


def make_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of the variant, with weights large enough that mistakes show. changes: to its sizes."""
    torch.manual_seed(seed)
    shape = {key: value for key, value in (SHAPE | VARIANTS[variant] | changes).items() if value is not None}
    if VARIANTS[variant].get("sliding_window", 0) is None:
        shape["sliding_window"] = None
    config = CONFIG_MAPPING[variant.split()[0]](**shape, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "bias" in name else 0.15
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def save_model(variant: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Save the variant as a transformers folder; returns the model."""
    model = make_model(variant, seed, **changes)
    model.save_pretrained(folder)
    return model
