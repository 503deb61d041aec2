"""The Triton kernels compiled for cards that are not here: within their limits, with tensor cores and wide loads."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CARDS = ["80", "86", "89", "90", "100"]


@pytest.mark.slow
def test_every_kernel_of_an_8b_model_fits_every_card() -> None:
    # In processes of their own, one a core: in this one kernels are interpreted.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "scripts/kernel_report.py", "--models", "llama-3.1-8b", "--formats", "auto", "--json"]
    running = [
        subprocess.Popen(
            [*command, "--cards", *cards], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for cards in (CARDS[:2], CARDS[2:])
    ]
    rows = []
    for process in running:
        out, told = process.communicate()
        assert process.returncode == 0, told.decode()
        rows += json.loads(out)
    assert {row["card"] for row in rows} == {int(card) for card in CARDS}
    kernels = {row["kernel"] for row in rows}
    assert kernels >= {"attend_kernel", "merge_kernel", "store_qkv_kernel", "rms_norm_kernel", "copy_blocks_kernel"}
    assert all(row["tensor_cores"] for row in rows if row["kernel"] == "attend_kernel")
    wide = ("attend_kernel", "merge_kernel", "store_qkv_kernel")
    assert all(row["wide_loads"] for row in rows if row["kernel"] in wide)
    assert all(row["registers"] > 0 for row in rows)
    assert not [row for row in rows if row["faults"]]


def test_what_is_beyond_a_card_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys; sys.path.insert(0, 'scripts'); import kernel_report as k\n" + (
        "row = k.Row('m', 'k', 'v', 86, 102_000, 255, 200, tensor_cores=False, wide_loads=False, dots=True)\n"
        "print('|'.join(row.faults))"
    )
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"102,000 bytes of shared memory.*200 bytes spilled.*no tensor-core.*no load of 16", told)


def test_the_table_in_the_docs_is_that_of_these_kernels() -> None:
    script = "import sys; sys.path.insert(0, 'scripts'); import kernel_report as k; print(k.sources_hash())"
    current = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    written = re.search(r"sources ([0-9a-f]{16})", (ROOT / "docs" / "kernels.md").read_text())
    assert written is not None
    assert written[1] == current.stdout.strip(), "run `make kernel-report`"
