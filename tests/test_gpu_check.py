"""scripts/gpu_check.py without a GPU: its cases in Triton's interpreter, at small sizes, so that one call is enough."""

import re
import sys
from pathlib import Path

import interpreter  # noqa: F401
import pytest
import torch

from localpaged.kernels import dispatch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_cases  # noqa: E402
import gpu_check  # noqa: E402
import gpu_models  # noqa: E402


@pytest.fixture(autouse=True)
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_on_cpu", True)


@pytest.mark.parametrize(
    "wanted",
    ["heads of 80", "window and cap", "store, torch.float16, fp8 KV",
     "heads of 96, part", "norm, torch.float16, 576", "gelu_tanh", "block copy, fp8", "sampling"],
)  # fmt: skip
def test_kernel_cases_are_right(wanted: str) -> None:
    (found, *_) = [case for case in gpu_cases.kernel_cases(quick=True, large=False) if wanted in case[0]]
    error, tolerance = found[1]()
    assert error <= tolerance


def test_a_wrong_result_is_told_and_ends_with_an_error() -> None:
    report = gpu_check.Report()
    report.check("right", 0.1, 0.2)
    report.check("wrong", 0.3, 0.2)
    report.check("not a number", float("nan"), 0.2)
    assert report.wrong == ["wrong", "not a number"]


def test_a_model_decodes_and_prefills_as_it_is_timed() -> None:
    model = gpu_models.Model("tiny")
    step_s, read_bytes = model.decode_step(2, context=20, graphs=True, steps=1)
    assert step_s > 0
    config = model.decoder.config
    weights = config.num_layers * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 96) + 100 * 64
    kv = 2 * 20 * 2 * config.num_layers * 2 * 16
    assert read_bytes == 2 * (weights + kv)
    seconds, operations = model.prefill(20, chunk=16)
    assert seconds > 0
    assert operations == 2 * (weights - 100 * 64) * 20 + 2 * config.num_layers * 4 * 16 * 20**2


def test_graphs_are_compared_with_the_same_steps_without() -> None:
    cases = list(gpu_models.graph_cases("tiny", context=70))
    assert len(cases) == 2
    for _, run in cases:
        error, tolerance = run()
        assert error <= tolerance


def test_blocks_that_are_moved_come_back() -> None:
    assert gpu_models.transfers(3, layers=1)["from host"]["right"]


def test_the_help_names_every_part() -> None:
    told = re.search(r"Parts: ([^.]*)\.", " ".join((gpu_check.__doc__ or "").split()))
    assert told is not None
    assert told[1].split(", ") == list(gpu_check.PARTS)
    assert set(gpu_check.GOALS) <= set(gpu_check.PARTS)


def test_an_engine_that_is_not_checked_is_told_and_one_that_is_wrong_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    report = gpu_check.Report()
    monkeypatch.setattr(gpu_models, "engine_needs", lambda: "msgspec")
    gpu_check.check_engine(report, quick=True)
    assert [row["name"] for row in report.rows] == ["not run: msgspec"]
    monkeypatch.setattr(gpu_models, "engine_needs", lambda: None)
    monkeypatch.setattr(gpu_models, "engine", lambda: iter([("sound", True), ("odd", False)]))
    gpu_check.check_engine(report, quick=True)
    assert report.wrong == ["engine: odd"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_check.py", str(tmp_path)])
        assert gpu_check.main() == 2
    assert "no CUDA device" in capsys.readouterr().out
