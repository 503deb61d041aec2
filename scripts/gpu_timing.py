"""Times work on a GPU by events, with nothing of it left in the second-level cache."""

import importlib.metadata
import statistics
from collections.abc import Callable
from typing import Any

import torch

# Measured once; what other measurements are shares of.
CARD: dict[str, float] = {}
FLUSH_BYTES = 256 << 20
_flush: list[torch.Tensor] = []


def seconds(run: Callable[[], Any], repeats: int = 20, flush: bool = True) -> float:
    """The median of some runs. flush: overwrite the cache before each, as other layers' work would."""
    if not _flush:
        _flush.append(torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda"))
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        if flush:
            _flush[0].zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def graphed(run: Callable[[], Any]) -> Callable[[], None]:
    """The same work as a graph, so that short kernels are timed without their launches."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    found = {}
    for package in ("torch", "triton", "transformers", "numba", "numpy", "flashinfer-python"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found
