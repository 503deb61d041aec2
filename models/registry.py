"""Which architectures run, and what each one's transformers configuration means for the decoder.

To add one: a function from its configuration to the fields of DecoderConfig that differ, an entry in
ARCHITECTURES, and a line in tests/test_decoder.py, which compares it with transformers.
"""

from collections.abc import Callable
from typing import Any

from localpaged.errors import ModelError
from localpaged.models.decoder_config import DecoderConfig, LayerConfig, RopeConfig

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}


def _llama(config: Any) -> dict[str, Any]:
    return {
        "qkv_bias": config.attention_bias,
        "output_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _mistral(config: Any) -> dict[str, Any]:
    return {}


def _qwen2(config: Any) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(config: Any) -> dict[str, Any]:
    return {"qk_norm": True, "qkv_bias": config.attention_bias, "output_bias": config.attention_bias}


def _gemma2(config: Any) -> dict[str, Any]:
    return {
        "norm_unit_offset": True,
        "sandwich_norms": True,
        "embedding_multiplier": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logit_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: Any) -> dict[str, Any]:
    return {
        "norm_unit_offset": True,
        "sandwich_norms": True,
        "qk_norm": True,
        "embedding_multiplier": config.hidden_size**0.5,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
    }


def _phi3(config: Any) -> dict[str, Any]:
    return {"fused_projections": True}


ARCHITECTURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
}


def decoder_config(config: Any) -> DecoderConfig:
    """Read a transformers PretrainedConfig. Raises ModelError for an architecture that does not run."""
    specific = ARCHITECTURES.get(config.model_type)
    if specific is None:
        raise ModelError(
            f"The architecture {config.model_type!r} is not supported. These are: "
            f"{', '.join(sorted(ARCHITECTURES))}. Choose a model of one of them."
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation not in ACTIVATIONS:
        raise ModelError(f"The activation {activation!r} is not supported; these are: {', '.join(ACTIVATIONS)}.")
    eos = config.eos_token_id
    fields: dict[str, Any] = {
        "architecture": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "layers": _layers(config),
        "ropes": _ropes(config, head_dim),
        "tied_embeddings": config.tie_word_embeddings,
        "activation": ACTIVATIONS[activation],
        "eos_token_ids": frozenset([eos] if isinstance(eos, int) else eos or []),
    }
    return DecoderConfig(**(fields | specific(config)))


def _layers(config: Any) -> tuple[LayerConfig, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    by_kind = "full_attention" in config.rope_parameters
    return tuple(
        LayerConfig(window=window if kind == "sliding_attention" else None, rope=kind if by_kind else "default")
        for kind in kinds
    )


def _ropes(config: Any, head_dim: int) -> dict[str, RopeConfig]:
    parameters = config.rope_parameters
    tables = parameters if "full_attention" in parameters else {"default": parameters}
    return {
        key: RopeConfig(dict(values), int(head_dim * values.get("partial_rotary_factor", 1.0)), key)
        for key, values in tables.items()
        if values is not None
    }
