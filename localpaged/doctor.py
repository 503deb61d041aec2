"""Examines this machine: what runs, what does not, and what to do about it."""

import importlib.metadata
import os
import platform
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from localpaged.errors import LocalpagedError
from localpaged.home import home

PACKAGES = ("torch", "triton", "numba", "transformers", "gradio", "sqlite-utils", "huggingface-hub")
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. good False means that something will not work."""

    name: str
    good: bool
    text: str

    @property
    def mark(self) -> str:
        return "ok" if self.good else "!!"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Look at everything; a check that raises is a finding too."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("packages", _packages),
        ("device", _device),
        ("memory", _memory),
        ("disk", _disk),
        ("database", _database),
        ("model", _model),
        *((f"kernel {name}", check) for name, check in _kernels()),
    ]
    findings = []
    for name, check in checks:
        try:
            findings.append(Finding(name, True, check()))
        # Whatever is wrong with a machine is what this is for to tell.
        except Exception as error:
            findings.append(Finding(name, False, str(error) or repr(error)))
    return findings


def _packages() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} missing")
    return ", ".join(found)


def _device() -> str:
    import torch

    from localpaged.engine.device_build import missing_for_cuda

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cuda = ""
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties()
        name = f"{card.name} (sm_{card.major}{card.minor}, {card.total_memory / GIB:.0f} GiB)"
        missing = missing_for_cuda()
        cuda = f"{name}, {'used' if missing is None else f'not used: {missing}'}; "
    return f"{cuda}CPU with {cores} cores, {torch.backends.cpu.get_cpu_capability()}"


def _memory() -> str:
    memory = psutil.virtual_memory()
    return f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"


def _disk() -> str:
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".doctor"
    probe.write_text("x")
    probe.unlink()
    return f"{folder} is writable, {shutil.disk_usage(folder).free / GIB:.1f} GiB free"


def _database() -> str:
    path = home() / "chats.db"
    if not path.exists():
        return "none yet; it is made by the first `localpaged serve`"
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        (verdict,) = connection.execute("PRAGMA quick_check").fetchone()
    if verdict != "ok":
        raise LocalpagedError(f"{path} is damaged: {verdict}. Restore it from a backup, or move it away.")
    return f"{path}, {path.stat().st_size:,} bytes, sound"


def _model() -> str:
    from localpaged.models.locate import list_models, locate_model

    default = locate_model(None)
    return f"{len(list_models())} here, {default.name} without --model"


def _kernels() -> list[tuple[str, Callable[[], str]]]:
    from localpaged.kernels.selftest import SELFTESTS

    def compare(run: Callable[[], float]) -> Callable[[], str]:
        def check() -> str:
            error = run()
            if not error < 1e-3:
                raise LocalpagedError(f"differs from its reference by {error:.1e}: do not use it on this machine.")
            return f"runs; differs from its reference by {error:.1e}"

        return check

    return [(name, compare(run)) for name, run in SELFTESTS.items()]
