"""Compiles every Triton kernel as it is launched, for cards that need not be here, and tells what each one takes.

    python scripts/kernel_report.py [--cards 80 90] [--models llama-3.1-8b] [--formats auto int8] [--json] [--write]

--write puts the table into docs/kernels.md, with a hash of the kernels' sources that a test compares. The launchers
themselves run, on small tensors, with Triton told that another card is there and not to launch: what is compiled is
what an engine of that shape would launch. Must not run under TRITON_INTERPRET.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

import localpaged.kernels.triton_target as triton_target
from localpaged.engine.input_buffer import InputBuffer
from localpaged.engine.step_input import HostStep
from localpaged.engine.step_plan import Geometry, plan_step
from localpaged.kernels import dispatch
from localpaged.kernels.block_copy import copy_blocks
from localpaged.kernels.paged_kv import KVFormat, PagedKV
from localpaged.kernels.planned_attention import planned_attention
from localpaged.kernels.rms_norm import add_rms_norm, rms_norm
from localpaged.kernels.sampling import Adjustments, SamplingRows, sample_rows
from localpaged.kernels.store_qkv import store_qkv
from localpaged.kernels.swiglu import Activation, gated_activation

ROOT = Path(__file__).resolve().parent.parent
CARDS = (80, 86, 89, 90, 100, 120)
# Runs, without tensor cores; not in the table.
OLDEST_CARD = 75
# Bytes of shared memory that a program may take.
SHARED_MEMORY = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
# Enough that a chunk is split; how many there are changes nothing else of what is compiled.
MULTIPROCESSORS = 128
# Bytes a thread that ptxas may keep on the stack: some registers outside the loop.
MOST_SPILLED = 96
# What it reads lies anywhere: the logits of some tokens.
GATHERING = {"adjust_kernel"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as far as kernels depend on them."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    rotated: float = 1.0
    window: int | None = None
    softcap: float | None = None
    gelu: bool = False


SHAPES = [
    Shape("smollm2-135m", 576, 1536, 9, 3, 64),
    Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, qk_norm=True),
    Shape("llama-3.1-8b", 4096, 14336, 32, 8, 128),
    Shape("gemma-3-1b", 1152, 6912, 4, 1, 256, qk_norm=True, window=512, gelu=True),
    Shape("gemma-2-2b", 2304, 9216, 8, 4, 256, window=4096, softcap=50.0, gelu=True),
    Shape("phi-3-mini", 3072, 8192, 32, 32, 96, window=2047),
    Shape("phi-2 (heads of 80)", 2560, 10240, 32, 32, 80, rotated=0.4),
]


@dataclass(frozen=True)
class Row:
    """What one kernel takes on one card. shared and spilled in bytes."""

    model: str
    kernel: str
    variant: str
    card: int
    shared: int
    registers: int
    spilled: int
    tensor_cores: bool
    wide_loads: bool
    dots: bool

    @property
    def faults(self) -> list[str]:
        """What of it is beyond what the card has or what is meant."""
        found = []
        if self.shared > SHARED_MEMORY[self.card]:
            found.append(f"{self.shared:,} bytes of shared memory, and there are {SHARED_MEMORY[self.card]:,}")
        if self.spilled > MOST_SPILLED:
            found.append(f"{self.registers} registers, {self.spilled} bytes spilled")
        if self.dots and self.card >= 80 and not self.tensor_cores:
            found.append("no tensor-core instruction")
        if not self.wide_loads and self.kernel not in GATHERING:
            found.append("no load of 16 bytes")
        return found


class OtherCard:
    """Stands in for Triton's driver: some card, on which nothing can run."""

    def __init__(self, card: int) -> None:
        self.card = card

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card, 32)

    def get_current_device(self) -> int:
        return self.card

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(cards: list[int], models: list[str], formats: list[str]) -> list[Row]:
    """Every kernel of these models for these cards."""
    rows: list[Row] = []
    where: dict[str, Any] = {}
    plain_run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        compiled = plain_run(self, *arguments, grid=grid, warmup=True, **options)
        row = describe(compiled, self.__name__, **where)
        if row not in rows:
            rows.append(row)
        return compiled

    JITFunction.run = compile_only
    dispatch.triton_on_cpu = True
    plain_capability = triton_target.capability
    for card in cards:
        triton.runtime.driver.set_active(OtherCard(card))
        triton_target.capability = lambda device, card=card: card
        for shape in SHAPES:
            if not models or shape.name in models:
                for variant, launch in launches(shape, card, formats):
                    where = {"model": shape.name, "variant": variant, "card": card}
                    launch()
    JITFunction.run, dispatch.triton_on_cpu, triton_target.capability = plain_run, False, plain_capability
    return rows


def launches(shape: Shape, card: int, formats: list[str]) -> list[tuple[str, Callable[[], Any]]]:
    """What an engine of this shape launches on this card: (variant, launch)."""
    dtype = torch.bfloat16 if card >= 80 else torch.float16
    found: list[tuple[str, Callable[[], Any]]] = []
    plain = KVFormat.BFLOAT16 if card >= 80 else KVFormat.FLOAT16
    kinds = [plain if name == "auto" else KVFormat(name) for name in formats]
    windows = [None] if shape.window is None else [None, shape.window]
    for kind in kinds:
        for shares in (False, True):
            for window in windows:
                name = (
                    f"decode, {kind.value} KV" + (", shared prefix" if shares else "") + (", window" if window else "")
                )
                found.append((name, lambda k=kind, s=shares, w=window: attend(shape, card, dtype, k, w, s, None)))
        for window in windows:
            for split in (False, True):
                name = f"prefill, {kind.value} KV" + ", split" * split + ", window" * bool(window)
                found.append((name, partial(attend, shape, card, dtype, kind, window, False, split)))
        found.append((f"{kind.value} KV", partial(store, shape, dtype, kind)))
    x, weight = torch.zeros(2, shape.hidden, dtype=dtype), torch.zeros(shape.hidden, dtype=dtype)
    gate_up = torch.zeros(2, 2 * shape.intermediate, dtype=dtype)
    found.append(("alone", lambda: rms_norm(x, weight, 1e-6)))
    found.append(("after adding", lambda: add_rms_norm(x, x.clone(), weight, 1e-6)))
    activation: Activation = "gelu_tanh" if shape.gelu else "silu"
    found.append((activation, lambda: gated_activation(gate_up, activation)))
    kv = PagedKV(1, 3, shape.kv_heads, 16, shape.head_dim, plain)
    logits = torch.zeros(2, 128_256)
    found.append(("", lambda: sample_rows(logits, draws(2, False))))
    found.append(("adjusted", lambda: sample_rows(logits, draws(2, True))))
    found.append(("in the pool", lambda: copy_blocks(kv.parts, kv.parts, torch.tensor([[1, 2]]))))
    return found


def attend(
    shape: Shape, card: int, dtype: torch.dtype, kind: KVFormat, window: int | None, shares: bool, split: bool | None
) -> None:
    """Attention of two decode rows, or, with split given, of a chunk of four tokens."""
    kv = PagedKV(1, 40, shape.kv_heads, 16, shape.head_dim, kind).layers[0]
    geometry = Geometry(
        shape.heads, shape.kv_heads, shape.head_dim, (window,), 16, dtype.itemsize, card, MULTIPROCESSORS
    )
    decodes = split is None
    plan = plan_step(
        geometry,
        np.array([600, 601] if decodes else [600], dtype=np.int32),
        [] if decodes else [4],
        np.array(([0, 2] if shares else [0, 1, 2]) if decodes else [0], dtype=np.int32),
        np.array(([30] if shares else [0, 0]) if decodes else [], dtype=np.int32),
        split_min_keys=4096 if split is False else 64,
    )
    num_rows = 2 if decodes else 4
    none, tables = np.zeros(num_rows, dtype=np.int32), np.zeros((2, 40), dtype=np.int32)
    host = HostStep(none, none, none, tables, 2 * decodes, plan.decode, plan.prefill, None, plan.shares)
    _, batch, _ = InputBuffer(torch.device("cpu")).fill(host)
    q = torch.zeros(num_rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=dtype)[:, : shape.heads]
    planned_attention(q, kv, batch, scale=0.1, window=window, softcap=shape.softcap)


def store(shape: Shape, dtype: torch.dtype, kind: KVFormat) -> None:
    """Norm, rotary embedding and the cache's slots for two tokens."""
    kv = PagedKV(1, 2, shape.kv_heads, 16, shape.head_dim, kind).layers[0]
    qkv = torch.zeros(2, shape.heads + 2 * shape.kv_heads, shape.head_dim, dtype=dtype)
    where = torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(4, int(shape.head_dim * shape.rotated) // 2)
    norm = torch.zeros(shape.head_dim, dtype=dtype)
    store_qkv(qkv, kv, where, where, (table, table), (norm, norm) if shape.qk_norm else None, 1e-6)


def draws(count: int, adjusted: bool) -> SamplingRows:
    """The parameters of some draws."""
    ints, floats = torch.zeros(count, dtype=torch.int32), torch.ones(count)
    table = Adjustments(ints, ints, ints, ints, ints, floats, floats, floats, floats) if adjusted else None
    return SamplingRows(ints, floats, ints, floats, floats, ints.long(), ints, ints, table)


def describe(compiled: Any, kernel: str, model: str, variant: str, card: int) -> Row:
    """What ptxas made of a kernel."""
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        told = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
    (registers,) = map(int, re.findall(r"REG:(\d+)", told))
    # What ptxas spills it keeps on the stack.
    spilled = sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", told)))
    return Row(
        model,
        kernel.strip("_"),
        variant,
        card,
        compiled.metadata.shared,
        registers,
        spilled,
        tensor_cores=bool(re.search(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
        # Four words, two of twice the size, or an asynchronous copy of 16 bytes.
        wide_loads=bool(re.search(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64|cp\.async\.cg", ptx)),
        dots="tt.dot" in compiled.asm["ttir"],
    )


def sources_hash() -> str:
    """Of everything that decides what is compiled, but for Triton itself."""
    digest = hashlib.sha256()
    files = [*sorted((ROOT / "kernels").glob("*_triton.py")), ROOT / "kernels" / "tile_config.py", Path(__file__)]
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def table(rows: list[Row], cards: list[int]) -> str:
    """docs/kernels.md: a line for each kernel, variant and model, a column for each card."""
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        variant = row.variant.replace("bfloat16 KV", "16-bit KV").replace("float16 KV", "16-bit KV")
        spilled = f", {row.spilled} B spilled" if row.spilled else ""
        text = f"{row.registers} / {row.shared / 1024:.0f} KiB{spilled}"
        cells.setdefault((row.kernel.removesuffix("_kernel"), variant, row.model), {})[row.card] = text
    head = ["kernel", "variant", "model", *(f"sm_{card}" for card in cards)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key in sorted(cells):
        lines.append("| " + " | ".join([*key, *(cells[key].get(card, "") for card in cards)]) + " |")
    limits = ", ".join(f"{SHARED_MEMORY[card] // 1024} KiB on sm_{card}" for card in cards)
    return f"""# What the Triton kernels take

Generated by `make kernel-report` with Triton {triton.__version__}; sources {sources_hash()}. Registers a thread and
shared memory a program, as ptxas made them for cards that were not there. Nothing here was run on a card.

Limits: {limits}; at most {MOST_SPILLED} bytes a thread spilled. Every kernel with a matrix product uses tensor cores
(sm_75, which is not in the table, multiplies without them, slowly). Every kernel loads 16 bytes at once, but for
adjust, whose numbers lie apart. A test compiles the kernels of llama-3.1-8b again for five cards and holds them to the
same limits.

{chr(10).join(lines)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, nargs="*", default=list(CARDS), choices=[OLDEST_CARD, *CARDS])
    parser.add_argument("--models", nargs="*", default=[], choices=[shape.name for shape in SHAPES])
    parser.add_argument("--formats", nargs="*", default=["auto", "int8", "fp8"], choices=["auto", "int8", "fp8"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = compile_all(arguments.cards, arguments.models, arguments.formats)
    faults = [(row, row.faults) for row in rows if row.faults]
    if arguments.json:
        print(json.dumps([asdict(row) | {"faults": row.faults} for row in rows]))
    for row, found in faults:
        print(f"{row.kernel} ({row.variant}, {row.model}, sm_{row.card}): {'; '.join(found)}", file=sys.stderr)
    if arguments.write and not faults:
        (ROOT / "docs" / "kernels.md").write_text(table(rows, arguments.cards))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
