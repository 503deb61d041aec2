"""How a GPU's memory is divided: weights, what a step needs, captured graphs, and KV in the rest.

Knows numbers only. The estimate is made from the model's sizes before anything is loaded, and logged beside what was
measured.
"""

from dataclasses import dataclass

from localpaged.errors import SettingError
from localpaged.models.decoder_config import DecoderConfig

GIB = 1 << 30
# vLLM's default.
UTILIZATION = 0.9
# Of what is free, not given to KV: for what a step takes besides, and for memory that lies in pieces.
RESERVE = 256 << 20
FRAGMENTED = 0.02


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes."""

    weights: int
    activations: int
    graphs: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.graphs + self.kv

    def __str__(self) -> str:
        parts = ((name, getattr(self, name)) for name in ("weights", "activations", "graphs", "kv"))
        return ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts)


def estimate_weights(config: DecoderConfig, element_bytes: int) -> int:
    """Bytes of a model's weights; biases and norms, which are small, are left out."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return (config.num_layers * layer + embeddings) * element_bytes


def estimate_activations(config: DecoderConfig, num_tokens: int, num_rows: int, element_bytes: int) -> int:
    """Bytes of the largest step: num_tokens through one layer, and logits for num_rows, twice over."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # Residual, normed hidden states, and the wider of what attention and feed-forward hold at once.
    attention = qkv + config.num_heads * config.head_dim
    widest = max(attention, 3 * config.intermediate_size) + 3 * config.hidden_size
    return num_tokens * widest * element_bytes + 2 * num_rows * config.vocab_size * 4


def check_pool(num_blocks: int, bytes_per_block: int) -> None:
    """Raise SettingError for a pool in which nothing can run."""
    if num_blocks < 2:
        raise SettingError(
            f"There is room for {num_blocks} blocks of {bytes_per_block:,} bytes. Give at least "
            f"--kv-cache-memory {16 * bytes_per_block}, or a smaller --block-size."
        )


def kv_bytes(
    use: MemoryUse,
    total: int,
    free: int,
    utilization: float,
    bytes_per_block: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """Bytes for KV: what utilization of the card's total leaves, and no more than is free.

    use: measured, without KV, and allocated already but for activations and graphs; total, free: of the card.
    Raises SettingError that says which setting to change to what when not even two blocks fit.
    """
    wanted = int(total * utilization) - use.weights - use.activations - use.graphs
    spare = free - use.activations - use.graphs - RESERVE - int(total * FRAGMENTED)
    room = min(wanted, spare)
    least = 2 * bytes_per_block
    if room >= least:
        return room
    needed = use.weights + use.activations + use.graphs + least
    told = (
        f"This model takes {use} and the card has {total / GIB:.2f} GiB, of which {utilization:.0%} may be used and "
        f"{free / GIB:.2f} GiB are free now. "
    )
    if wanted < least and needed <= 0.98 * total and spare >= least:
        share = min(int(needed / total * 100) + 2, 98) / 100
        raise SettingError(told + f"Start with --gpu-memory-utilization {share}.")
    if use.activations + use.graphs > least - room:
        seqs = max(max_num_seqs // 4, 1)
        raise SettingError(
            told
            + f"Start with --max-num-seqs {seqs} --max-num-batched-tokens {max(max_num_batched_tokens // 4, seqs)}, "
            "or end other programs that use the card."
        )
    raise SettingError(told + "End other programs that use the card, or choose a smaller model.")
