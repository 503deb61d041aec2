"""A decoder-only transformer assembled from a DecoderConfig, over paged KV.

Token ids of many sequences in, hidden states and logits out. Knows nothing of requests, blocks'
owners or sampling; where each token's KV goes is in the AttentionBatch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from localpaged.kernels.attention import attention
from localpaged.kernels.attention_batch import AttentionBatch
from localpaged.kernels.grouped_weight import GroupedWeight
from localpaged.kernels.linear import Linear
from localpaged.kernels.paged_kv import LayerKV
from localpaged.kernels.planned_attention import planned_attention
from localpaged.kernels.planned_batch import PlannedBatch
from localpaged.kernels.rms_norm import add_rms_norm, rms_norm
from localpaged.kernels.rotary import apply_rotary
from localpaged.kernels.store_qkv import store_qkv
from localpaged.kernels.swiglu import gated_activation
from localpaged.models.decoder_config import DecoderConfig, LayerConfig
from localpaged.models.rotary_table import rotary_table
from localpaged.models.weights import Weights


class Norm:
    """RMSNorm over the last dimension."""

    def __init__(self, weight: Tensor, config: DecoderConfig) -> None:
        self.weight = weight
        self.eps = config.norm_eps
        self.unit_offset = config.norm_unit_offset

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.unit_offset)

    def after_adding(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to the residual in place; the norm of the sum."""
        return add_rms_norm(x, residual, self.weight, self.eps, self.unit_offset)


class Embedding:
    """Rows of the vocabulary's matrix [V, C] by token id, from its compact form where there is one."""

    def __init__(self, weights: Weights, name: str, multiplier: float) -> None:
        self.multiplier = multiplier
        self.grouped = weights.grouped(name)
        self.weight = None if self.grouped is not None else weights.tensor(name)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [T] -> [T, C], a new tensor."""
        if self.weight is not None:
            rows = self.weight[token_ids]
        else:
            grouped = self.grouped
            assert grouped is not None
            minimum = None if grouped.minimum is None else grouped.minimum[token_ids]
            rows = GroupedWeight(grouped.q[token_ids], grouped.scale[token_ids], minimum, grouped.group).dequantize()
        if self.multiplier == 1.0:
            return rows
        # In the weights' type, as the model was trained with.
        return rows * torch.tensor(self.multiplier, dtype=rows.dtype).item()


class Attention:
    """Grouped-query attention of one layer."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, weights: Weights, prefix: str, exact: bool) -> None:
        self.config = config
        self.window = layer.window
        self.exact = exact
        parts = ["qkv_proj"] if config.fused_projections else ["q_proj", "k_proj", "v_proj"]
        self.qkv = load_linear(weights, [f"{prefix}.{part}" for part in parts], config.qkv_bias, exact)
        self.output = load_linear(weights, [f"{prefix}.o_proj"], config.output_bias, exact)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = Norm(weights.tensor(f"{prefix}.q_norm.weight"), config)
            self.k_norm = Norm(weights.tensor(f"{prefix}.k_norm.weight"), config)

    def __call__(
        self,
        hidden: Tensor,
        batch: AttentionBatch | PlannedBatch,
        cache: LayerKV,
        table: tuple[Tensor, Tensor] | None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """hidden [T, C] -> [T, C]; K and V of the T tokens are written to the cache.

        rows: batch.last_rows(), to have the output for these alone, [R, C].
        """
        num_heads, head_dim = self.config.num_heads, self.config.head_dim
        qkv = self.qkv(hidden).view(hidden.shape[0], num_heads + 2 * self.config.num_kv_heads, head_dim)
        if isinstance(batch, PlannedBatch):
            out = self._attend_planned(qkv, batch, cache, table)
            out = out if rows is None else out[rows]
        else:
            out = self._attend(qkv, batch, cache, table, rows)
        return self.output(out.view(-1, num_heads * head_dim))

    def _attend_planned(
        self, qkv: Tensor, batch: PlannedBatch, cache: LayerKV, table: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        config = self.config
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm.weight, self.k_norm.weight)
        store_qkv(qkv, cache, batch.slots, batch.positions, table, norms, config.norm_eps, config.norm_unit_offset)
        return planned_attention(
            qkv[:, : config.num_heads],
            cache,
            batch,
            scale=config.scale,
            window=self.window,
            softcap=config.attention_softcap,
        )

    def _attend(
        self,
        qkv: Tensor,
        batch: AttentionBatch,
        cache: LayerKV,
        table: tuple[Tensor, Tensor] | None,
        rows: Tensor | None,
    ) -> Tensor:
        config = self.config
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, head_dim)).view(-1, num_heads, head_dim)
            k = self.k_norm(k.reshape(-1, head_dim)).view(-1, num_kv_heads, head_dim)
        if table is not None:
            apply_rotary(q, k, *table, batch.positions)
        if rows is not None:
            q, batch = q[rows], batch.for_last_rows()
        return attention(
            q,
            k,
            v,
            cache.k,
            cache.v,
            batch,
            scale=config.scale,
            window=self.window,
            softcap=config.attention_softcap,
            exact=self.exact,
        )


class GatedMlp:
    """act(gate(x)) * up(x), projected down."""

    def __init__(self, config: DecoderConfig, weights: Weights, prefix: str, exact: bool) -> None:
        parts = ["gate_up_proj"] if config.fused_projections else ["gate_proj", "up_proj"]
        self.gate_up = load_linear(weights, [f"{prefix}.{part}" for part in parts], config.mlp_bias, exact)
        self.down = load_linear(weights, [f"{prefix}.down_proj"], config.mlp_bias, exact)
        self.activation = config.activation

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(gated_activation(self.gate_up(hidden), self.activation))


class Layer:
    """Attention and MLP with their norms. Sandwich norms also normalise what each of them adds."""

    def __init__(self, config: DecoderConfig, layer: LayerConfig, weights: Weights, prefix: str, exact: bool) -> None:
        def norm(name: str) -> Norm:
            return Norm(weights.tensor(f"{prefix}.{name}.weight"), config)

        self.rope = layer.rope
        self.input_norm = norm("input_layernorm")
        self.attention = Attention(config, layer, weights, f"{prefix}.self_attn", exact)
        self.mlp = GatedMlp(config, weights, f"{prefix}.mlp", exact)
        self.attention_out_norm = self.mlp_out_norm = None
        if config.sandwich_norms:
            self.attention_out_norm = norm("post_attention_layernorm")
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self.mlp_out_norm = norm("post_feedforward_layernorm")
        else:
            self.mlp_norm = norm("post_attention_layernorm")


class Decoder:
    """The model. num_positions bounds the positions that its rotary tables hold.

    exact: float32 products throughout, where otherwise weights take the form that is fastest.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        num_positions: int,
        transformers_config: Any = None,
        exact: bool = False,
    ) -> None:
        self.config = config
        divisors = weights.tensor("rope_freqs.weight", torch.float32) if weights.has("rope_freqs.weight") else None
        self.tables = {
            key: rotary_table(rope, num_positions, transformers_config, divisors, weights.placement.device)
            for key, rope in config.ropes.items()
        }
        self.embedding = Embedding(weights, "model.embed_tokens.weight", config.embedding_multiplier)
        self.layers = [
            Layer(config, layer, weights, f"model.layers.{index}", exact) for index, layer in enumerate(config.layers)
        ]
        self.norm = Norm(weights.tensor("model.norm.weight"), config)
        if config.tied_embeddings and self.embedding.weight is not None:
            # One matrix in memory for both uses, where it is multiplied as it is.
            self.head = Linear.pack(self.embedding.weight, exact=exact)
        else:
            name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
            self.head = load_linear(weights, [name], bias=False, exact=exact)
        self._next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]

    @property
    def weight_form(self) -> str:
        """How most of the weights are held, for people to read."""
        return self.layers[0].mlp.down.form

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch | PlannedBatch,
        caches: Sequence[LayerKV],
        every_row: bool = False,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """token_ids [T] -> hidden states after the last norm, of batch.last_rows(), [R, C]. Writes the KV.

        every_row: return those of all T tokens, where otherwise the last layer leaves out what nothing reads.
        before_layer: called with each layer's index before its cache is used.
        """
        residual = self.embedding(token_ids)
        hidden = self.layers[0].input_norm(residual)
        rows = None
        wanted = None if every_row else batch.last_rows()
        for index, (layer, next_norm, cache) in enumerate(zip(self.layers, self._next_norms, caches, strict=True)):
            if before_layer is not None:
                before_layer(index)
            table = self.tables[layer.rope] if layer.rope is not None else None
            if layer is self.layers[-1] and wanted is not None:
                rows = wanted
                residual = residual[rows]
            out = layer.attention(hidden, batch, cache, table, rows)
            if layer.attention_out_norm is not None:
                out = layer.attention_out_norm(out)
            out = layer.mlp(layer.mlp_norm.after_adding(out, residual))
            if layer.mlp_out_norm is not None:
                out = layer.mlp_out_norm(out)
            hidden = next_norm.after_adding(out, residual)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, C] of the rows that need them -> float32 [R, V]."""
        logits = self.head(hidden).float()
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap is not None else logits


def load_linear(weights: Weights, names: list[str], bias: bool, exact: bool = False) -> Linear:
    """One layer whose output is that of the named ones side by side."""
    grouped_parts = [weights.grouped(f"{name}.weight") for name in names]
    grouped = None
    if all(part is not None for part in grouped_parts):
        grouped = GroupedWeight.concatenate([part for part in grouped_parts if part is not None])
    biases = torch.cat([weights.tensor(f"{name}.bias") for name in names]) if bias else None
    if grouped is not None and not exact:
        linear = Linear.pack_grouped(grouped, biases)
        if linear is not None:
            return linear
    weight = torch.cat([weights.tensor(f"{name}.weight") for name in names])
    return Linear.pack(weight, biases, grouped, exact)
