"""A tiny Llama with a tokenizer whose tokens are bytes, for tests of the engine."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import save_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

BLOCK_SIZE = 8
BYTES_PER_BLOCK = 2 * 3 * 2 * 16 * 4 * BLOCK_SIZE


def save_byte_model(path: Path, **changes: Any) -> Any:
    """Write the model and its tokenizer into a folder; the model. changes: to its sizes."""
    model = save_model("llama", path, **changes)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<s>", "</s>", *alphabet, *(f"x{i}" for i in range(320 - 259))]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return model


def prompt(length: int, salt: int = 0) -> dict[str, list[int]]:
    """Token ids of some length that differ by salt."""
    return {"prompt_token_ids": [(i * 37 + salt * 11) % 300 + 3 for i in range(length)]}


def greedy(reference: Any, token_ids: list[int], count: int) -> list[int]:
    """What transformers answers."""
    out = reference.generate(
        torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids)), max_new_tokens=count, do_sample=False
    )
    answer: list[int] = out[0, len(token_ids) :].tolist()
    return answer
