"""`localpaged bench serve`: a work replayed against a server, with a progress bar, a report and a plot."""

import asyncio
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from localpaged.errors import SettingError
from localpaged.load.chat_client import ChatClient, Outcome
from localpaged.load.plot import draw
from localpaged.load.replay import Asking, Replay, first_model
from localpaged.load.report import describe, report
from localpaged.load.workload import PROMPTS, TRACE, Chat, arrivals, azure, mt_bench

WORKS = ("mt-bench", "azure")


@dataclass(frozen=True, slots=True)
class ServeBench:
    """What to ask of which server. Times are milliseconds where the name says so."""

    base_url: str
    work: str
    num_requests: int
    asking: Asking
    api_key_file: Path | None = None
    trace: Path = TRACE
    prompts: Path = PROMPTS
    request_rate: float | None = None
    speed: float = 1.0
    max_input_tokens: int | None = None
    timeout_s: float = 600.0
    ttft_slo_ms: float | None = None
    itl_slo_ms: float | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Raise SettingError for what makes no sense, before anything is asked."""
        if self.work not in WORKS:
            raise SettingError(f"--work is {self.work!r}; it must be {' or '.join(WORKS)}.")
        if not self.base_url.startswith(("http://", "https://")):
            raise SettingError(f"--base-url is {self.base_url!r}; it begins with http:// and ends with /v1.")
        if self.plot is not None and self.plot.suffix != ".svg":
            raise SettingError(f"--plot writes SVG: name the file {self.plot.with_suffix('.svg')}.")
        if self.plot is not None and not self.plot.absolute().parent.is_dir():
            raise SettingError(f"--plot {self.plot}: there is no such folder.")
        for name in ("num_requests", "request_rate", "speed", "max_input_tokens", "ttft_slo_ms", "itl_slo_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise SettingError(f"--{name.removesuffix('_ms').replace('_', '-')} is {value}; it must be above 0.")

    def chats(self) -> list[Chat]:
        """The work with the times at which it is asked."""
        if self.work == "azure":
            chats = azure(self.trace, self.num_requests, self.speed, self.max_input_tokens)
        else:
            chats = mt_bench(self.prompts, self.num_requests)
        if self.request_rate is None:
            return chats
        times = arrivals(len(chats), self.request_rate, self.asking.seed)
        return [replace(chat, arrival_s=arrival_s) for chat, arrival_s in zip(chats, times, strict=True)]

    def key(self) -> str | None:
        """Of the file, else of OPENAI_API_KEY, as OpenAI's clients have it."""
        if self.api_key_file is None:
            return os.environ.get("OPENAI_API_KEY") or None
        try:
            return self.api_key_file.expanduser().read_text().strip()
        except OSError as error:
            raise SettingError(f"--api-key-file {self.api_key_file} cannot be read: {error.strerror}.") from error


def run_bench_serve(bench: ServeBench, json_output: bool) -> None:
    """Ask, print the report, write the plot. Raises LocalpagedError when the server does not answer at all."""
    bench.check()
    chats = bench.chats()
    # The bar is for a person who watches; what a program reads goes to stdout.
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=json_output or not console.is_terminal,
    )
    with bar:
        replay = asyncio.run(_replay(bench, chats, bar))
    line = {"base_url": bench.base_url, "work": bench.work}
    line |= report(replay, bench.ttft_slo_ms, bench.itl_slo_ms)
    print(json.dumps(line) if json_output else describe(line))
    if bench.plot is not None:
        bench.plot.write_text(draw(replay, line), encoding="utf-8")
        if not json_output:
            print(f"\n  plot: {bench.plot}")


async def _replay(bench: ServeBench, chats: list[Chat], bar: Progress) -> Replay:
    total = sum(len(chat.questions) for chat in chats)
    task = bar.add_task(bench.work, total=total, note="")
    failed = 0

    def on_outcome(outcome: Outcome) -> None:
        nonlocal failed
        failed += outcome.error is not None
        bar.update(task, advance=1, note=f"{failed} failed" if failed else "")

    client = ChatClient(bench.base_url, bench.key(), bench.timeout_s)
    try:
        asking = bench.asking if bench.asking.model else replace(bench.asking, model=await first_model(client))
        replay = Replay(client, asking, on_outcome)
        await replay.calibrate()
        await replay.run(chats)
    finally:
        await client.close()
    return replay
