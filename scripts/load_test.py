"""Many clients at once for some minutes on one server: no leak, no 5xx, memory flat, nobody starves.

    load_test.py                                   64 clients for 10 minutes on a server that it starts, in a small pool
    load_test.py --minutes 1 --clients 16 --flag=--max-num-seqs --flag=32
    load_test.py --base-url http://127.0.0.1:7860  a server that runs: its conversations are left alone

Prints a table, with --json the report alone. Exit status 1 when one of the criteria fails.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from load_clients import Crowd, Outcome

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_S = 1.0
# What may differ between the first and the last third of the time, and the longest wait for a first word.
MEMORY_GROWTH = 1.10
LONGEST_WAIT = 12.0
SETTLE_S = 60


class Watch:
    """What processes take, sampled every second: resident bytes, open files, threads."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: list[dict[str, tuple[int, int, int]]] = []

    def look(self) -> dict[str, tuple[int, int, int]]:
        return {name: (p.memory_info().rss, p.num_fds(), p.num_threads()) for name, p in self.processes.items()}

    async def keep_looking(self) -> None:
        while True:
            self.samples.append(self.look())
            await asyncio.sleep(SAMPLE_S)

    def report(self) -> dict[str, Any]:
        """Of each process: medians of the first and the last third, the first tenth left out, and the ends."""
        found = {}
        for name in self.processes:
            samples = [sample[name] for sample in self.samples]
            samples = samples[len(samples) // 10 :]
            third = max(len(samples) // 3, 1)
            first, last = samples[:third], samples[-third:]
            found[name] = {
                "rss_mib_first_third": round(statistics.median(sample[0] for sample in first) / 2**20, 1),
                "rss_mib_last_third": round(statistics.median(sample[0] for sample in last) / 2**20, 1),
                "rss_mib_most": round(max(sample[0] for sample in samples) / 2**20, 1),
                "most_files": max(sample[1] for sample in samples),
                "most_threads": max(sample[2] for sample in samples),
            }
        return found


def audit(base_url: str) -> dict[str, Any]:
    """What /api/kv tells of the pool."""
    stats: dict[str, Any] = httpx.get(f"{base_url}/api/kv?conversations=false", timeout=60, trust_env=False).json()
    names = "num_blocks free cached referenced leases leased running waiting preemptions generated_tokens consistent"
    return {name: stats[name] for name in names.split()}


def settled(base_url: str, forget: bool) -> dict[str, Any]:
    """The pool's audit when nothing runs any more; forget: all conversations are deleted first."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        stats = audit(base_url)
        if (stats["running"] == stats["waiting"] == 0) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if forget:
        with httpx.Client(base_url=base_url, timeout=60, trust_env=False) as http:
            while found := http.get("/api/conversations").json()["conversations"]:
                for one in found:
                    http.delete(f"/api/conversations/{one['id']}")
        stats = audit(base_url)
    return stats


def percentiles(values: list[float]) -> dict[str, float]:
    found = sorted(values)
    return {f"p{p}": round(found[min(int(len(found) * p / 100), len(found) - 1)], 3) for p in (50, 95, 99, 100)}


def summarize(outcomes: list[Outcome]) -> dict[str, Any]:
    """By kind: how many, their statuses, how many left, the waits for a first word."""
    kinds: dict[str, Any] = {}
    for kind in sorted({outcome.kind for outcome in outcomes}):
        some = [outcome for outcome in outcomes if outcome.kind == kind]
        waits = [outcome.first_s for outcome in some if outcome.first_s is not None]
        kinds[kind] = {
            "requests": len(some),
            "left": sum(outcome.left for outcome in some),
            "statuses": dict(Counter(outcome.status for outcome in some if outcome.status)),
            "first_s": percentiles(waits) if waits else None,
            "took_s": percentiles([outcome.took_s for outcome in some]),
        }
    waits = [outcome.first_s for outcome in outcomes if outcome.first_s is not None]
    per_client = Counter(outcome.client for outcome in outcomes)
    return {
        "requests": len(outcomes),
        "kinds": kinds,
        "num_5xx": sum(outcome.status >= 500 for outcome in outcomes),
        "faults": [f"{outcome.kind}: {outcome.fault}" for outcome in outcomes if outcome.fault],
        "first_s": percentiles(waits) if waits else None,
        "longest_wait_over_median": round(max(waits) / statistics.median(waits), 2) if waits else None,
        "requests_per_client": {"fewest": min(per_client.values()), "most": max(per_client.values())},
    }


def verdicts(report: dict[str, Any]) -> dict[str, bool]:
    """Each criterion, and whether it holds."""
    start, end = report["kv_at_start"], report["kv_at_end"]
    found = {
        "no 5xx": report["num_5xx"] == 0,
        "every answer as it should be": not report["faults"],
        "no block in use at the end": end["referenced"] - end["leased"] == 0 and end["running"] == end["waiting"] == 0,
        "the pool adds up": bool(end["consistent"]),
        "as many leases as at the start": end["leases"] == start["leases"],
        "nobody starves": report["first_s"] is None or report["longest_wait_over_median"] <= LONGEST_WAIT,
    }
    for name, process in report["processes"].items():
        growth = process["rss_mib_last_third"] / process["rss_mib_first_third"]
        found[f"memory of the {name} is flat"] = growth <= MEMORY_GROWTH
        ends = report["at_rest"]
        found[f"files of the {name} are closed"] = ends["end"][name]["files"] <= ends["start"][name]["files"] + 2
        found[f"threads of the {name} as before"] = ends["end"][name]["threads"] <= ends["start"][name]["threads"] + 2
    if "errors_logged" in report:
        found["nothing in the log is an error"] = not report["errors_logged"]
    return found


async def put_under_load(crowd: Crowd, seconds: float, watch: Watch) -> None:
    """The crowd for so long, watched."""
    looking = asyncio.create_task(watch.keep_looking())
    await crowd.run(seconds)
    looking.cancel()


def at_rest(watch: Watch) -> dict[str, Any]:
    return {
        name: {"rss_mib": round(r / 2**20, 1), "files": f, "threads": t} for name, (r, f, t) in watch.look().items()
    }


def load_test(base_url: str, pids: dict[str, int], minutes: float, crowd: Crowd, forget: bool) -> dict[str, Any]:
    """Warm up, put the server under load, let it settle; the report."""
    warm_up = Crowd(base_url, crowd.model, 8, crowd.seed + 1, crowd.length, crowd.long_words)
    asyncio.run(warm_up.run(min(minutes * 6, 20)))
    start = settled(base_url, forget)
    watch = Watch(pids)
    rest_at_start = at_rest(watch)
    asyncio.run(put_under_load(crowd, minutes * 60, watch))
    end = settled(base_url, forget)
    # Connections that were kept for a next request are closed after five seconds without one.
    time.sleep(6)
    return {
        "minutes": minutes,
        "clients": crowd.num_clients,
        **summarize(crowd.outcomes),
        "kv_at_start": start,
        "kv_at_end": end,
        "processes": watch.report(),
        "at_rest": {"start": rest_at_start, "end": at_rest(watch)},
    }


@contextmanager
def server(flags: list[str]) -> Iterator[tuple[str, int, Path]]:
    """`localpaged serve` with a folder of its own: (address, process id, folder)."""
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "out.log"
        command = [sys.executable, "-m", "localpaged", "serve", "--port", "0", *flags]
        environment = os.environ | {"LOCALPAGED_HOME": name, "PYTHONPATH": str(ROOT)}
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            while "is ready:" not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"The server did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield log.read_text().split("is ready:")[1].split()[0], process.pid, folder
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def errors_logged(folder: Path) -> list[str]:
    """Lines of the server's and the engine's log that tell of an error."""
    lines = [line for path in (folder / "logs").glob("*.log*") for line in path.read_text().splitlines()]
    found = [json.loads(line) for line in lines]
    return [json.dumps(entry)[:2000] for entry in found if entry.get("level", "").upper() in ("ERROR", "CRITICAL")]


def show(report: dict[str, Any]) -> None:
    """The report as a table for people."""
    print(f"{report['requests']} requests of {report['clients']} clients in {report['minutes']:g} minutes")
    print(f"\n{'kind':30}{'requests':>9}{'left':>6}  {'first word s: p50':>17}{'p95':>8}{'longest':>9}  statuses")
    for kind, found in report["kinds"].items():
        waits = found["first_s"] or {}
        statuses = ", ".join(f"{count} × {status}" for status, count in sorted(found["statuses"].items()))
        times = "".join(f"{waits.get(p, '–'):>{width}}" for p, width in (("p50", 19), ("p95", 8), ("p100", 9)))
        print(f"{kind:30}{found['requests']:>9}{found['left']:>6}{times}  {statuses}")
    print(f"\nlongest wait over the median: {report['longest_wait_over_median']}")
    print(f"requests of a client: {report['requests_per_client']}")
    for name, process in report["processes"].items():
        print(f"{name}: {process}, at rest {report['at_rest']['start'][name]} -> {report['at_rest']['end'][name]}")
    print(f"KV before: {report['kv_at_start']}\nKV after:  {report['kv_at_end']}")
    for fault, count in Counter(report["faults"] + report.get("errors_logged", [])).most_common(20):
        print(f"fault, {count} times: {fault}")
    for name, holds in report["verdicts"].items():
        print(f"{'holds ' if holds else 'FAILS '} {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base-url", help="a server that runs, in place of one that this starts")
    parser.add_argument("--kv-cache-memory", default="128M", help="of the server that this starts")
    parser.add_argument("--flag", action="append", default=[], help="a further flag of the server that this starts")
    parser.add_argument("--json", action="store_true", help="print the report alone")
    arguments = parser.parse_args()

    def run(base_url: str, pids: dict[str, int], forget: bool) -> dict[str, Any]:
        model = httpx.get(f"{base_url}/v1/models", trust_env=False).json()["data"][0]["id"]
        crowd = Crowd(base_url, model, arguments.clients, arguments.seed)
        return load_test(base_url, pids, arguments.minutes, crowd, forget)

    if arguments.base_url:
        report = run(arguments.base_url.rstrip("/"), {}, forget=False)
    else:
        with server(["--kv-cache-memory", arguments.kv_cache_memory, *arguments.flag]) as (base_url, pid, folder):
            engine = httpx.get(f"{base_url}/api/kv", trust_env=False).json()["pid"]
            report = run(base_url, {"server": pid, "engine": engine}, forget=True)
            report["errors_logged"] = errors_logged(folder)
    report["verdicts"] = verdicts(report)
    print(json.dumps(report)) if arguments.json else show(report)
    return 0 if all(report["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
