"""A crowd of clients on the real engine with a small pool for a few seconds: nothing fails and nothing is left.

The same for ten minutes, with a server process, is scripts/load_test.py; docs/load.md has its figures.
"""

import asyncio
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from api_server import application, listening, wait_until

from localpaged.engine.config import EngineConfig
from localpaged.models.chat_tokenizer import load_tokenizer
from localpaged.server import metrics
from localpaged.server.metrics import MeteredEngine
from localpaged.store.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import load_test  # noqa: E402
from load_clients import Crowd, Outcome  # noqa: E402

NUM_CLIENTS = 12
SECONDS = 3


@pytest.mark.slow
def test_a_crowd_that_leaves_cancels_and_errs_leaves_nothing_behind(tmp_path: Path, default_model_path: Path) -> None:
    # 91 blocks: what a dozen of the requests need, so that some are put aside for others.
    engine = MeteredEngine(EngineConfig(model=str(default_model_path), name="real", kv_cache_memory=64 << 20))
    app = application(engine, Store(tmp_path / "chats.db"), tokenizer=load_tokenizer(default_model_path))
    app.include_router(metrics.router(engine))

    @app.get("/tasks")
    async def tasks() -> list[str]:
        return [str(task.get_coro()) for task in asyncio.all_tasks()]

    seed = secrets.randbelow(1000)
    print(f"seed {seed}")
    with listening(app) as url:
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 200, 120)
        crowd = Crowd(url, "real", 2, seed, length=(2, 12), long_words=120)
        asyncio.run(crowd.run(0.5))
        before = at_rest(url)
        files = psutil.Process().num_fds()
        crowd = Crowd(url, "real", NUM_CLIENTS, seed, length=(2, 12), long_words=120)
        asyncio.run(crowd.run(SECONDS))
        found = load_test.summarize(crowd.outcomes)
        assert found["faults"] == [] and found["num_5xx"] == 0
        assert found["requests"] > NUM_CLIENTS and found["requests_per_client"]["fewest"] >= 1
        after = at_rest(url)
        assert after["kv"]["consistent"] and after["kv"]["num_blocks"] == before["kv"]["num_blocks"]
        for name in ("referenced", "leases", "leased", "running", "waiting"):
            assert after["kv"][name] == before["kv"][name] == 0, name
        assert app.state.gate.num_requests == 0
        assert app.state.jobs.running_conversations() == []
        assert engine._events == {} and engine._calls == {}
        # The loop's own, this request's, and connections that are kept for a next request.
        wait_until(lambda: len(httpx.get(f"{url}/tasks").json()) <= len(before["tasks"]) + 1, 20)
        wait_until(lambda: psutil.Process().num_fds() <= files + 4, 20)


def at_rest(url: str) -> dict[str, Any]:
    return {"kv": load_test.settled(url, forget=True), "tasks": httpx.get(f"{url}/tasks").json()}


def outcomes(**changes: Any) -> list[Outcome]:
    return [Outcome("chat", client, 0.0, 1.0, 200, first_s=0.5) for client in range(3)] + [
        Outcome("chat", 0, 0.0, **({"status": 200, "first_s": 0.4} | changes))
    ]


@pytest.mark.parametrize(
    ("changes", "kv", "rest", "failing"),
    [
        ({}, {}, {}, set()),
        ({"status": 503, "fault": "503"}, {}, {}, {"no 5xx", "every answer as it should be"}),
        ({"first_s": 90.0}, {}, {}, {"nobody starves"}),
        ({}, {"referenced": 1}, {}, {"no block in use at the end"}),
        ({}, {"leases": 1}, {}, {"as many leases as at the start"}),
        ({}, {"consistent": False}, {}, {"the pool adds up"}),
        ({}, {}, {"files": 90}, {"files of the server are closed"}),
        ({}, {}, {"threads": 90}, {"threads of the server as before"}),
    ],
)
def test_each_criterion_fails_on_its_own(
    changes: dict[str, Any], kv: dict[str, Any], rest: dict[str, Any], failing: set[str]
) -> None:
    pool = {"referenced": 0, "leased": 0, "leases": 0, "running": 0, "waiting": 0, "consistent": True}
    report = load_test.summarize(outcomes(**changes)) | {"kv_at_start": pool, "kv_at_end": pool | kv}
    ends = {"files": 10, "threads": 5}
    report["at_rest"] = {"start": {"server": ends}, "end": {"server": ends | rest}}
    report["processes"] = {"server": {"rss_mib_first_third": 100.0, "rss_mib_last_third": 101.0}}
    assert {name for name, holds in load_test.verdicts(report).items() if not holds} == failing
    report["processes"]["server"]["rss_mib_last_third"] = 150.0
    assert not load_test.verdicts(report)["memory of the server is flat"]


def test_processes_are_watched() -> None:
    watch = load_test.Watch({"server": os.getpid()})
    watch.samples = [watch.look() for _ in range(12)]
    found = watch.report()["server"]
    assert found["rss_mib_most"] >= found["rss_mib_last_third"] > 10 and found["most_threads"] >= 1
