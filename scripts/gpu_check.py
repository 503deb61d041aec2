"""Checks and measures everything that runs on a GPU: one call, a table at the end, and the full result as JSON.

    python scripts/gpu_check.py OUT [--quick] [--only PART ...] [--tune]

Needs a CUDA card, torch, triton, transformers (with safetensors), numba, numpy, a C compiler and Python.h; no network:
weights are random, in the shapes of real models. Exits with 1 when any result is wrong or could not be had, whatever
the speed. Parts: kernels, card, decode, sharing, end_to_end, prefill, transfer, engine. A part that fails is reported,
and the others run. OUT/gpu_check.json has every number.
--tune: sweep the attention kernels' tile sizes and print the best ones instead.
"""

import argparse
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import gpu_attention as attention  # noqa: E402
import gpu_cases as cases  # noqa: E402
import gpu_models as models  # noqa: E402
import gpu_timing as timing  # noqa: E402
import torch  # noqa: E402

# What is hoped for on an H200.
GOALS = {
    "decode": "at least 0.85 of copy bandwidth from 8k context at batch 8; never slower than FlexAttention",
    "sharing": "at least 3 times as fast as not sharing at n = 8 and a prefix of 8k",
    "end_to_end": "at least 0.80 of the roofline at batch 1 to 8",
}


class Report:
    """Results as they come: rows for the table, wrong results, and what could not run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []
        self.failed: dict[str, str] = {}

    def add(self, part: str, name: str, **values: Any) -> None:
        self.rows.append({"part": part, "name": name, **values})
        shown = "  ".join(f"{key} {_shown(value)}" for key, value in values.items())
        print(f"{part:<11} {name:<52} {shown}", flush=True)

    def check(self, name: str, error: float, tolerance: float) -> None:
        """A result that must be right: NaN is wrong too."""
        good = bool(error <= tolerance)
        if not good:
            self.wrong.append(name)
        self.add("kernels", name, error=error, tolerance=tolerance, right=good)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check_kernels(report: Report, quick: bool) -> None:
    """(a) Each kernel against its float32 reference on fresh random input."""
    for name, run in itertools.chain(cases.kernel_cases(quick), models.graph_cases()):
        try:
            report.check(name, *run())
        # The others are still worth having, unless the device is lost.
        except Exception:
            report.failed[name] = traceback.format_exc()
            print(f"{name} failed: {report.failed[name]}", flush=True)
            torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure_card(report: Report, quick: bool) -> None:
    """(b) The card's copy bandwidth and its rate of matrix products; other parts are shares of these."""
    size = 1 << (28 if quick else 30)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * size / timing.seconds(lambda: target.copy_(source)) / 1e9
    a = torch.randn(8192, 8192, dtype=cases.DTYPE, device="cuda")
    rate = 2 * 8192**3 / timing.seconds(lambda: a @ a) / 1e12
    timing.CARD.update(copy_gb_s=copy, tflops=rate)
    report.add("card", torch.cuda.get_device_name(), copy_gb_s=copy, matrix_tflop_s=rate)


def measure_decode(report: Report, quick: bool) -> None:
    """(c) Decode attention, beside SDPA on gathered KV, FlexAttention with a paged mask, and FlashInfer."""
    for batch in (1, 8, 64):
        for context in (1024, 8192) if quick else (1024, 8192, 32768):
            for name, times in attention.decode_attention(batch, context).items():
                share = times["gb_s"] / timing.CARD["copy_gb_s"]
                report.add("decode", f"batch {batch}, context {context}: {name}", **times, of_copy=share)
            torch.cuda.empty_cache()


def measure_sharing(report: Report, quick: bool) -> None:
    """(d) n candidates over one prefix, with and without sharing."""
    for n in (2, 4, 8, 16):
        for prefix in (512, 8192) if quick else (512, 2048, 8192, 32768):
            shared, alone = attention.shared_attention(n, prefix, True), attention.shared_attention(n, prefix, False)
            report.add("sharing", f"n {n}, prefix {prefix}", shared_us=shared, alone_us=alone, faster=alone / shared)
            torch.cuda.empty_cache()


def measure_end_to_end(report: Report, quick: bool) -> None:
    """(e) A whole decode step, with and without graphs, beside transformers with a static cache."""
    for shape in ("smollm2-135m", "qwen3-0.6b", "llama-3.1-8b"):
        if quick and shape != "llama-3.1-8b":
            continue
        model = models.Model(shape)
        for batch in (1, 4, 8, 32):
            for graphs in (True, False):
                step_s, read_bytes = model.decode_step(batch, context=1024, graphs=graphs)
                floor_s = read_bytes / timing.CARD["copy_gb_s"] / 1e9
                report.add(
                    "end_to_end",
                    f"{shape}, batch {batch}, {'graphs' if graphs else 'no graphs'}",
                    ms=step_s * 1000,
                    tok_s=batch / step_s,
                    of_roofline=floor_s / step_s,
                )
        if not quick:
            del model
            torch.cuda.empty_cache()
            step_s = models.transformers_step(shape, context=1024)
            report.add("end_to_end", f"{shape}, batch 1, transformers", ms=step_s * 1000, tok_s=1 / step_s)
        torch.cuda.empty_cache()


def measure_prefill(report: Report, quick: bool) -> None:
    """(f) Prompts, in chunks of 2,048 tokens."""
    model = models.Model("llama-3.1-8b")
    for length in (2048, 8192):
        prompt_s, operations = model.prefill(length)
        rate = operations / prompt_s / 1e12
        report.add(
            "prefill", f"llama-3.1-8b, {length} tokens", tok_s=length / prompt_s, of_matrix=rate / timing.CARD["tflops"]
        )


def measure_transfer(report: Report, quick: bool) -> None:
    """(g) Blocks to and from pinned memory; they come back as they were."""
    for name, values in models.transfers(64 if quick else 512).items():
        report.add("transfer", name, **values)
        if not values.get("right", True):
            report.wrong.append(f"transfer: {name}")


def check_engine(report: Report, quick: bool) -> None:
    """The engine itself, from a folder of weights to tokens, where the packages that it needs are here."""
    missing = models.engine_needs()
    if missing:
        report.add("engine", f"not run: {missing}")
        return
    for name, good in models.engine():
        report.add("engine", name, right=good)
        if not good:
            report.wrong.append(f"engine: {name}")


PARTS: dict[str, Callable[[Report, bool], None]] = {
    "kernels": check_kernels,
    "card": measure_card,
    "decode": measure_decode,
    "sharing": measure_sharing,
    "end_to_end": measure_end_to_end,
    "prefill": measure_prefill,
    "transfer": measure_transfer,
    "engine": check_engine,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, about two minutes")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=[])
    parser.add_argument("--tune", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was checked.")
        return 2
    from localpaged.engine.device_build import missing_for_cuda

    if (missing := missing_for_cuda()) is not None:
        print(f"Nothing was checked: {missing}")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    report = Report()
    if arguments.tune:
        for row in attention.tune():
            report.add("tune", **row)
    wanted = [] if arguments.tune else [name for name in PARTS if not arguments.only or name in arguments.only]
    if wanted and "card" not in wanted:
        wanted.insert(0, "card")
    for name in wanted:
        try:
            PARTS[name](report, arguments.quick)
        # The other parts are still worth having.
        except Exception:
            report.failed[name] = traceback.format_exc()
            print(report.failed[name], flush=True)
        torch.cuda.empty_cache()
    result = {
        "card": torch.cuda.get_device_name(),
        "versions": timing.versions(),
        "seconds": time.perf_counter() - start,
        "goals": GOALS,
        "rows": report.rows,
        "wrong": report.wrong,
        "failed": report.failed,
    }
    (arguments.out / "gpu_check.json").write_text(json.dumps(result, indent=1))
    print_table(report)
    wrong, failed = report.wrong or "nothing", list(report.failed) or "nothing"
    print(f"{result['seconds']:.0f} s; wrong: {wrong}; could not run: {failed}")
    return int(bool(report.wrong or report.failed))


def print_table(report: Report) -> None:
    """Everything once more, right results as one line."""
    print("\n=== summary")
    checked = [row for row in report.rows if "right" in row]
    print(f"{sum(row['right'] for row in checked)} of {len(checked)} checks right")
    for row in report.rows:
        if "right" not in row or not row["right"]:
            shown = "  ".join(f"{k} {_shown(v)}" for k, v in row.items() if k not in ("part", "name"))
            print(f"{row['part']:<11} {row['name']:<52} {shown}")
    for part, goal in GOALS.items():
        if any(row["part"] == part for row in report.rows):
            print(f"goal for {part}: {goal}")


if __name__ == "__main__":
    sys.exit(main())
