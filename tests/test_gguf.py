"""GGUF files: every readable type and architecture, the cache, and files that are not right."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tiny_models import make_model

from localpaged.engine.runner import ModelRunner
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.scheduler import Chunk, Step
from localpaged.engine.sequence import Request
from localpaged.errors import ModelError
from localpaged.models import gguf_header
from localpaged.models.chat_tokenizer import load_tokenizer
from localpaged.models.gguf_header import read_header, transformers_config
from localpaged.models.gguf_weights import GgufWeights
from localpaged.models.load import open_checkpoint

Q = GGMLQuantizationType
WRITABLE = [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does with the queries and keys of a Llama."""
    shape = (heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def write(path: Path, model: Any, architecture: str, kind: GGMLQuantizationType = Q.F32) -> None:
    """Write a transformers model as a GGUF."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(
        config.head_dim if hasattr(config, "head_dim") else config.hidden_size // config.num_attention_heads
    )
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<pad>", "<s>", "<|im_end|>", "t", "1", *(f"t{i}" for i in range(1, config.vocab_size - 4))])
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            data = interleave(data, heads)
        known = names.get_name(name, (".weight", ".bias"))
        if known is None:
            continue
        if data.ndim == 1:
            writer.add_tensor(known, data)
        else:
            writer.add_tensor(known, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(path: Path, token_ids: list[int]) -> torch.Tensor:
    runner = ModelRunner(open_checkpoint(path).build(64, exact=True), 8, 8)
    sequence = Request("r", token_ids, SamplingParams(), 0, 1).sequences[0]
    sequence.block_table = list(range(-(-len(token_ids) // 8)))
    hidden = runner.forward(Step(prefills=[Chunk(sequence, len(token_ids), True)]), every_row=True)
    return runner.logits(hidden)


def wide_model(variant: str) -> Any:
    """A tiny model whose rows hold whole quantisation blocks."""
    import tiny_models

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    before = dict(tiny_models.SHAPE)
    tiny_models.SHAPE |= sizes
    try:
        return make_model(variant)
    finally:
        tiny_models.SHAPE |= before


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_logits_equal_those_of_transformers(architecture: str, tmp_path: Path, fresh_home: Path) -> None:
    model = make_model(architecture)
    path = tmp_path / "tiny.gguf"
    write(path, model, architecture)
    token_ids = [5, 99, 23, 7, 301, 45, 2, 8, 9, 11]
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0]
    assert (logits(path, token_ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_weights_equal_the_gguf_packages_dequantisation(
    kind: GGMLQuantizationType, tmp_path: Path, fresh_home: Path
) -> None:
    model = wide_model("llama")
    path = tmp_path / "tiny.gguf"
    write(path, model, "llama", kind)
    header = read_header(path)
    weights = GgufWeights(path, header, transformers_config(header))
    for name in (
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ):
        original = model.state_dict()[name].numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
        assert np.array_equal(weights.tensor(name).numpy(), expected)
        grouped = weights.grouped(name)
        if grouped is not None:
            assert torch.allclose(grouped.dequantize(), weights.tensor(name), atol=1e-6)
    assert weights.has("model.norm.weight")
    assert not weights.has("model.layers.0.self_attn.q_norm.weight")


def test_a_second_reading_takes_the_cache(tmp_path: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, make_model("qwen2"), "qwen2")
    first = read_header(path)
    monkeypatch.setattr(gguf_header, "_parse", lambda *_: pytest.fail("the header was parsed again"))
    assert read_header(path) == first


def test_a_file_that_changed_is_read_again(tmp_path: Path, fresh_home: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, make_model("qwen2"), "qwen2")
    assert read_header(path).architecture == "qwen2"
    write(path, make_model("qwen3"), "qwen3")
    assert read_header(path).architecture == "qwen3"


@pytest.mark.parametrize("keep", [3, 50, 5000, -200])
def test_a_truncated_file_is_refused_with_the_remedy(keep: int, tmp_path: Path, fresh_home: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, make_model("qwen2"), "qwen2")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="Fetch the model again"):
        read_header(path)


def test_what_is_no_gguf_is_refused(tmp_path: Path, fresh_home: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("hello there")
    with pytest.raises(ModelError, match="not a GGUF"):
        read_header(path)
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "none.gguf")


def test_an_unsupported_architecture_is_named(tmp_path: Path, fresh_home: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, make_model("qwen2"), "gemma2")
    with pytest.raises(ModelError, match="'gemma2'.*llama"):
        read_header(path)


def test_the_default_models_tokenizer_is_its_own(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(default_model_path)
    # Digits one by one, and a space that belongs to the word behind it.
    assert [tokenizer.token_text(i) for i in tokenizer.encode("In 1999 it's")] == [
        "In",
        " ",
        "1",
        "9",
        "9",
        "9",
        " it",
        "'s",
    ]
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text.count("<|im_start|>") == 3
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("naïve 猫🐈 x")) == "naïve 猫🐈 x".encode()
