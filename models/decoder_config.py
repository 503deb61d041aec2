"""What distinguishes one decoder from another, in this project's own terms.

Knows nothing of files or tensors; registry.py fills it from a transformers configuration.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary table. parameters are transformers' rope_parameters: rope_type, rope_theta and its scaling."""

    parameters: dict[str, Any]
    dim: int
    key: str = "default"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer. window: how many latest tokens it attends to, None for all. rope: which table, None for none."""

    window: int | None
    rope: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder. Sizes in elements; multipliers and caps as in the model's own configuration."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    ropes: dict[str, RopeConfig]
    tied_embeddings: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_unit_offset: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_projections: bool = False
    sandwich_norms: bool = False
    embedding_multiplier: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return self.attention_scale if self.attention_scale is not None else self.head_dim**-0.5

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_bytes
