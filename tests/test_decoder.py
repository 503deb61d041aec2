"""The decoder against transformers: the same logits, however the batch is cut."""

import random
from pathlib import Path

import pytest
import torch
from tiny_models import VARIANTS, save_model

from localpaged.engine.runner import ModelRunner
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.scheduler import Chunk, Step
from localpaged.engine.sequence import Phase, Request, Sequence
from localpaged.errors import ModelError
from localpaged.models.load import open_checkpoint

BLOCK_SIZE = 8
LENGTHS = [1, 7, 8, 29, 40]


def shuffled_sequences(lengths: list[int], rng: random.Random) -> list[Sequence]:
    """Sequences of random tokens whose block tables are scattered over one pool of 64 blocks."""
    free = list(range(64))
    rng.shuffle(free)
    sequences = []
    for index, length in enumerate(lengths):
        request = Request(str(index), [rng.randrange(3, 320) for _ in range(length)], SamplingParams(), 0, 1)
        request.phase = Phase.DECODE
        sequence = request.sequences[0]
        sequence.block_table = [free.pop() for _ in range(-(-length // BLOCK_SIZE))]
        sequences.append(sequence)
    return sequences


def run_in_steps(runner: ModelRunner, sequences: list[Sequence], rng: random.Random) -> list[list[torch.Tensor]]:
    """Compute all sequences in mixed batches of random chunks; logits of every token of each sequence."""
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(sequence.num_uncomputed for sequence in sequences):
        step = Step()
        for sequence in rng.sample(sequences, len(sequences)):
            if sequence.num_uncomputed and rng.random() < 0.8:
                num_tokens = rng.randint(1, min(9, sequence.num_uncomputed))
                decodes = num_tokens == 1 and rng.random() < 0.7
                (step.decodes if decodes else step.prefills).append(Chunk(sequence, num_tokens, True))
        if not step.chunks:
            continue
        # What a runner gives is valid until its next step.
        rows = runner.logits(runner.forward(step, every_row=True)).clone()
        # The same tokens once more, with the last layer for the last token of each chunk alone.
        last = runner.logits(runner.forward(step))
        end = 0
        for index, chunk in enumerate(step.chunks):
            end += chunk.num_tokens
            logits[sequences.index(chunk.sequence)] += list(rows[end - chunk.num_tokens : end])
            assert (last[index] - rows[end - 1]).abs().max() < 1e-5
            chunk.sequence.num_computed += chunk.num_tokens
    return logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_mixed_paged_batch_equal_transformers(variant: str, tmp_path: Path) -> None:
    reference = save_model(variant, tmp_path)
    decoder = open_checkpoint(tmp_path).build(num_positions=128, exact=True)
    runner = ModelRunner(decoder, num_blocks=64, block_size=BLOCK_SIZE)
    runner.kv.values.fill_(torch.nan)
    rng = random.Random(variant)
    sequences = shuffled_sequences(LENGTHS, rng)
    computed = run_in_steps(runner, sequences, rng)
    for sequence, rows in zip(sequences, computed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence.token_ids])).logits[0]
        assert (torch.stack(rows) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("variant", ["llama", "qwen3", "mistral window"])
def test_float32_is_exact_for_long_chunks_too(variant: str, tmp_path: Path) -> None:
    # Long enough for every faster, rounded form that a chunk can take without exact.
    reference = save_model(variant, tmp_path)
    runner = ModelRunner(open_checkpoint(tmp_path).build(num_positions=512, exact=True), 64, BLOCK_SIZE)
    (sequence,) = shuffled_sequences([500], random.Random(variant))
    hidden = runner.forward(Step(prefills=[Chunk(sequence, 500, True)]), every_row=True)
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence.token_ids])).logits[0]
    assert (runner.logits(hidden) - expected).abs().max() < 1e-4


def test_an_unsupported_architecture_is_named_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="'bert' is not supported.*llama"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights_says_how_to_get_them(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="localpaged pull"):
        open_checkpoint(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        open_checkpoint(tmp_path)
