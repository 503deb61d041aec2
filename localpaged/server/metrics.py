"""Prometheus metrics: the engine's counters and pool, and the times that people wait.

Source: https://prometheus.io/docs/practices/naming/.
"""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from localpaged.engine.client import EngineClient
from localpaged.engine.messages import Delta, Event
from localpaged.errors import EngineDeadError
from localpaged.server.remote_engine import RemoteEngine

GAUGES = {
    "free": "Blocks with no content",
    "cached": "Blocks in no table that hold a findable prefix",
    "referenced": "Blocks in at least one table",
    "shared": "Blocks in more than one table",
    "saved": "Blocks that sharing saves",
    "num_blocks": "Blocks in the pool",
    "leases": "Answers whose blocks are kept between turns",
    "leased": "Blocks that only those hold",
    "waste_tokens": "Slots of tables that hold no token",
    "running": "Sequences that are running",
    "waiting": "Sequences that wait",
    "host_bytes": "KV in host memory, below the pool",
    "disk_bytes": "KV on disk",
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of admitted requests",
    "cached_tokens": "Prompt tokens that were not computed again",
    "generated_tokens": "Tokens drawn",
    "preemptions": "Requests that gave their blocks back to others",
    "given_up": "Leases whose blocks were given to others",
    "evicted": "Cached blocks that were given to others",
    "steps": "Forward passes",
    "loaded_tokens": "Tokens whose KV was read from host memory or disk",
}
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Waits:
    """How long people wait for what comes of requests, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first = Histogram(
            "localpaged_time_to_first_token_seconds",
            "From a request to the first token of any candidate",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._between = Histogram(
            "localpaged_inter_token_seconds",
            "Between two tokens of one candidate",
            buckets=SECONDS,
            registry=self.registry,
        )

    async def measured(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        """The events of one request as they come. Closing this closes them."""
        start = time.perf_counter()
        last: dict[int, float] = {}
        try:
            async for event in events:
                if isinstance(event, Delta) and (event.token_ids or event.text):
                    now = time.perf_counter()
                    if not last:
                        self._first.observe(now - start)
                    # A piece of text without ids may be of several tokens.
                    if event.index in last and event.token_ids:
                        self._between.observe(now - last[event.index])
                    last[event.index] = now
                yield event
        finally:
            await events.aclose()  # type: ignore[attr-defined]


class MeteredEngine(EngineClient):
    """An engine client that measures what comes through it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits = Waits()

    def generate(self, *arguments: Any, **named: Any) -> AsyncIterator[Event]:
        return self.waits.measured(super().generate(*arguments, **named))


class MeteredRemote(RemoteEngine):
    """Another server's engine, measured likewise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.waits = Waits()

    def generate(self, *arguments: Any, **named: Any) -> AsyncIterator[Event]:
        return self.waits.measured(super().generate(*arguments, **named))


class _Snapshot:
    """The engine's numbers of one moment, for one scrape."""

    def __init__(self, up: bool, stats: dict[str, Any]) -> None:
        self.up = up
        self.stats = stats

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("localpaged_up", "Whether the model is loaded", value=float(self.up))
        for name, text in GAUGES.items():
            if name in self.stats:
                yield GaugeMetricFamily(f"localpaged_kv_{name}", text, value=float(self.stats[name]))
        for name, text in COUNTERS.items():
            if name in self.stats:
                yield CounterMetricFamily(f"localpaged_{name}", text, value=float(self.stats[name]))


def router(engine: MeteredEngine | MeteredRemote) -> APIRouter:
    """GET /metrics."""
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics")
    async def metrics() -> Response:
        try:
            snapshot = _Snapshot(True, await engine.stats())
        except EngineDeadError:
            snapshot = _Snapshot(False, {})
        moment = CollectorRegistry(auto_describe=False)
        moment.register(snapshot)
        return Response(
            generate_latest(engine.waits.registry) + generate_latest(moment), media_type=CONTENT_TYPE_LATEST
        )

    return routes
