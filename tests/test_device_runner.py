"""The GPU's runner, sampler and builder on the CPU: the same code with its kernels in Triton's interpreter."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import interpreter  # noqa: F401
import pytest
import torch
from byte_model import BLOCK_SIZE, greedy, prompt, save_byte_model
from test_decoder import run_in_steps, shuffled_sequences
from tiny_models import save_model

from localpaged import LLM, SamplingParams
from localpaged.engine import build
from localpaged.engine.decode_graphs import graph_sizes
from localpaged.engine.device_build import choose_kv_format, model_geometry
from localpaged.engine.device_runner import DeviceRunner
from localpaged.engine.messages import Finished, Generate
from localpaged.errors import SettingError
from localpaged.kernels import attention_plan, dispatch
from localpaged.kernels.paged_kv import KVFormat, PagedKV
from localpaged.models.load import open_checkpoint
from localpaged.models.weights import Placement


@pytest.fixture(autouse=True)
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_on_cpu", True)
    # Prompts are short here, and shared all the same.
    monkeypatch.setattr(attention_plan, "SHARE_MIN_KEYS", 8)


def make_runner(folder: Path, format: KVFormat = KVFormat.FLOAT32, use_graphs: bool = True) -> DeviceRunner:
    """A model over 64 blocks, every slot of which is NaN."""
    decoder = open_checkpoint(folder).build(num_positions=128)
    config = decoder.config
    kv = PagedKV(config.num_layers, 64, config.num_kv_heads, BLOCK_SIZE, config.head_dim, format)
    for part in kv.parts:
        part.fill_(torch.nan) if part.is_floating_point() else part.fill_(127)
    return DeviceRunner(decoder, kv, model_geometry(decoder, BLOCK_SIZE, Placement()), 4, 64, use_graphs)


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"num_attention_heads": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_a_mixed_paged_batch_equal_transformers(variant: str, tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 2, "num_attention_heads": 4} | VARIANTS[variant]
    reference = save_model(variant, tmp_path, **changes)
    rng = random.Random(variant)
    sequences = shuffled_sequences([1, 8, 13], rng)
    computed = run_in_steps(make_runner(tmp_path), sequences, rng)
    for sequence, rows in zip(sequences, computed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence.token_ids])).logits[0]
        assert (torch.stack(rows) - expected).abs().max() < 1e-4


# One layer whose heads one program takes: the interpreter is slow.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 4}
BYTES_PER_BLOCK = 2 * 2 * 16 * 4 * BLOCK_SIZE


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model's folder, and the same in transformers."""
    folder = tmp_path_factory.mktemp("small")
    return folder, save_byte_model(folder, **SMALL)


def make_llm(folder: Path, num_blocks: int = 64, **settings: Any) -> LLM:
    settings = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 96} | settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "warm_up", lambda *arguments: None)
        patch.setattr(build, "measure", lambda *arguments: None)
        return LLM(str(folder), kv_cache_memory=num_blocks * BYTES_PER_BLOCK, **settings)


@pytest.fixture(scope="module")
def shared_llm(small: tuple[Path, Any]) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "triton_on_cpu", True)
        return make_llm(small[0])


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The engine, its pool audited after the test."""
    shared_llm._engine.core.pool.forget_cached()
    yield shared_llm
    stats = shared_llm.kv_stats()
    assert (stats["referenced"], stats["consistent"]) == (0, True)


def test_greedy_answers_of_a_mixed_batch_equal_transformers(llm: LLM, small: tuple[Path, Any]) -> None:
    prompts = [prompt(length, length) for length in (1, 8, 17)]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)):
        assert output.outputs[0].token_ids == greedy(small[1], output.prompt_token_ids, 7)


def test_sampled_candidates_that_share_a_prompt_are_those_of_the_cpu_engine(
    llm: LLM, small: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=11, ignore_eos=True, temperature=0.9, top_p=0.95, logprobs=2)
    outputs = llm.generate([prompt(21)], params)[0].outputs
    builder = llm._engine.core.runner.builder
    assert builder.num_prepared_used > 0
    monkeypatch.setattr(dispatch, "triton_on_cpu", False)
    expected = make_llm(small[0], dtype="float32").generate([prompt(21)], params)[0].outputs
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    assert len({tuple(one.token_ids) for one in outputs}) == 3
    for one, other in zip(outputs, expected, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert [p.chosen.token_id for p in one.logprobs or []] == [p.chosen.token_id for p in other.logprobs or []]


def test_a_preempted_answer_goes_on_as_if_nothing_had_been(small: tuple[Path, Any]) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=8, ignore_eos=True)
    prompts = [prompt(6, 1), prompt(6, 2)]
    tight = make_llm(small[0], num_blocks=5)
    answers = [[one.token_ids for one in out.outputs] for out in tight.generate(prompts, params)]
    assert tight.kv_stats()["preemptions"] > 0
    alone = [make_llm(small[0]).generate([p], params)[0].outputs for p in prompts]
    assert answers == [[one.token_ids for one in outputs] for outputs in alone]


def test_a_cancelled_candidate_changes_nothing_for_the_others(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    whole = [one.token_ids for one in llm.generate([prompt(12)], params)[0].outputs]
    core = llm._engine.core
    core.pool.forget_cached()
    assert not core.submit(Generate(request_id="r", prompt_token_ids=prompt(12)["prompt_token_ids"], params=params))
    events = [event for _ in range(4) for event in core.step()]
    events += core.cancel("r", 1)
    while core.has_work:
        events += core.step()
    assert isinstance(events[-1], Finished)
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for event in events:
        if hasattr(event, "token_ids"):
            told[event.index] += event.token_ids
    assert (told[0], told[2]) == (whole[0], whole[2])
    assert len(told[1]) < 6


def test_beam_search_and_prompt_logprobs(llm: LLM, small: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    beams = SamplingParams(beam_width=3, n=2, max_tokens=6)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    outputs, reports = llm.generate([prompt(9)], beams)[0].outputs, llm.generate([prompt(9)], asked)[0].prompt_logprobs
    monkeypatch.setattr(dispatch, "triton_on_cpu", False)
    cpu = make_llm(small[0], dtype="float32")
    assert [one.token_ids for one in outputs] == [one.token_ids for one in cpu.generate([prompt(9)], beams)[0].outputs]
    expected = cpu.generate([prompt(9)], asked)[0].prompt_logprobs
    assert reports is not None and expected is not None and len(reports) == len(expected)
    for one, other in zip(reports[1:], expected[1:], strict=True):
        assert one is not None and other is not None
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)


@pytest.mark.parametrize("format", [KVFormat.FLOAT32, KVFormat.INT8, KVFormat.FP8])
def test_blocks_come_back_from_host_memory_as_they_were(small: tuple[Path, Any], format: KVFormat) -> None:
    runner = make_runner(small[0], format)
    for part in runner.kv.parts:
        part.copy_(torch.randint(-100, 100, part.shape).to(part.dtype))
    before = [part.clone() for part in runner.kv.parts]
    kept = runner.read_blocks([5, 2, 9])
    for part in runner.kv.parts:
        part.zero_()
    runner.write_blocks([1, 3, 7], kept.__array__())
    for part, old in zip(runner.kv.parts, before, strict=True):
        assert torch.equal(part[:, [1, 3, 7]], old[:, [5, 2, 9]])
        assert not part[:, [0, 2, 4, 5, 6, *range(8, 64)]].any()
    assert kept.nbytes == 3 * runner.bytes_per_block


def test_quantised_keys_and_values_answer_almost_alike(small: tuple[Path, Any]) -> None:
    def hidden(format: KVFormat) -> torch.Tensor:
        rng = random.Random(4)
        return torch.stack(run_in_steps(make_runner(small[0], format), shuffled_sequences([9], rng), rng)[0])

    exact = hidden(KVFormat.FLOAT32)
    assert 0 < (hidden(KVFormat.INT8) - exact).abs().max() < 0.1
    assert 0 < (hidden(KVFormat.FP8) - exact).abs().max() < 0.6


def test_graphs_and_no_graphs_compute_the_same(small: tuple[Path, Any]) -> None:
    def rows(use_graphs: bool) -> torch.Tensor:
        rng = random.Random(6)
        sequences = shuffled_sequences([2, 6], rng)
        return torch.cat(
            [torch.stack(r) for r in run_in_steps(make_runner(small[0], use_graphs=use_graphs), sequences, rng)]
        )

    assert torch.equal(rows(True), rows(False))


def test_graph_sizes_reach_the_most_rows_and_no_further() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(3) == [1, 2, 3]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(64)[-3:] == [48, 56, 64]


def test_a_kv_format_that_does_not_go_with_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kv_format("fp8", Placement()) is KVFormat.FP8
    with pytest.raises(SettingError, match="bfloat16 does not go with weights of torch.float32"):
        choose_kv_format("bfloat16", Placement())
    monkeypatch.setattr(dispatch, "triton_on_cpu", False)
    with pytest.raises(SettingError, match="not available on a CPU"):
        choose_kv_format("int8", Placement())
