"""What a replay says about a server: throughput, goodput, and percentiles of every latency.

Names are those of `vllm bench serve` where it has them. Times are milliseconds. Latencies are those of requests that
came to their end; those that failed are counted by kind.
"""

import math
from collections import Counter
from typing import Any

from localpaged.load.chat_client import Outcome
from localpaged.load.replay import Replay

PERCENTILES = (50, 95, 99)
LATENCIES = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token latency",
    "tpot_ms": "time per output token",
    "e2el_ms": "end to end",
}


def percentile(values: list[float], percent: float) -> float:
    """By linear interpolation between the nearest ranks, as numpy does. values must be sorted, not empty."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def latencies_ms(outcomes: list[Outcome]) -> dict[str, list[float]]:
    """Sorted samples of each latency: of each answer's first piece, gaps, tokens, and of each request."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    answers = [(outcome, answer) for outcome in good for answer in outcome.answers if answer.times]
    samples = {
        "ttft_ms": [answer.times[0] - outcome.begin for outcome, answer in answers],
        "itl_ms": [
            after - before
            for _, answer in answers
            for before, after in zip(answer.times, answer.times[1:], strict=False)
        ],
        "tpot_ms": [time_s for outcome in good for time_s in outcome.time_per_token_s()],
        "e2el_ms": [outcome.end - outcome.begin for outcome in good],
    }
    return {name: sorted(1000 * value for value in values) for name, values in samples.items()}


def is_good(outcome: Outcome, ttft_slo_ms: float | None, itl_slo_ms: float | None) -> bool:
    """Whether a request met its objectives: the first piece of all its answers, each one's mean time per token."""
    if outcome.error is not None:
        return False
    ttft_s = outcome.ttft_s
    if ttft_slo_ms is not None and (ttft_s is None or ttft_s * 1000 > ttft_slo_ms):
        return False
    return itl_slo_ms is None or all(time_s * 1000 <= itl_slo_ms for time_s in outcome.time_per_token_s())


def report(replay: Replay, ttft_slo_ms: float | None, itl_slo_ms: float | None) -> dict[str, Any]:
    """Every figure, for programs to read."""
    outcomes = replay.outcomes
    good = [outcome for outcome in outcomes if outcome.error is None]
    duration_s = max((outcome.end for outcome in outcomes), default=replay.began) - replay.began
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    prompt_tokens = [outcome.prompt_tokens for outcome in good if outcome.prompt_tokens is not None]
    cached_tokens = [outcome.cached_tokens for outcome in good if outcome.cached_tokens is not None]
    num_tokens = sum(outcome.num_tokens for outcome in good)
    met = sum(is_good(outcome, ttft_slo_ms, itl_slo_ms) for outcome in outcomes)
    line: dict[str, Any] = {
        "model": replay.asking.model,
        "n": replay.asking.n,
        "duration_s": round(duration_s, 3),
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()),
        "error_details": _details(outcomes),
        "not_asked": replay.num_skipped,
        "without_text": sum(not answer.times for outcome in good for answer in outcome.answers),
        "total_input_tokens": sum(prompt_tokens) if len(prompt_tokens) == len(good) else None,
        "cached_tokens": sum(cached_tokens) if cached_tokens else None,
        "total_output_tokens": num_tokens,
        "tokens_from": "usage" if all(one.completion_tokens is not None for one in good) else "pieces",
        "request_throughput": round(len(good) * per_s, 4),
        "output_throughput": round(num_tokens * per_s, 2),
        "ttft_slo_ms": ttft_slo_ms,
        "itl_slo_ms": itl_slo_ms,
        "request_goodput": round(met * per_s, 4),
        "max_late_s": round(replay.max_late_s, 3),
    }
    for name, values in latencies_ms(outcomes).items():
        line[name] = None
        if values:
            figures = {"mean": math.fsum(values) / len(values)}
            figures |= {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
            line[name] = {key: round(value, 3) for key, value in (figures | {"max": values[-1]}).items()}
    return line


def _details(outcomes: list[Outcome]) -> dict[str, str]:
    """What the first request of each kind of error was told."""
    found: dict[str, str] = {}
    for outcome in outcomes:
        if outcome.error is not None and outcome.detail:
            found.setdefault(outcome.error, outcome.detail)
    return found


def describe(line: dict[str, Any]) -> str:
    """The same for people."""
    completed, failed = line["completed"], line["failed"]
    rows = [
        f"{line['model']}: {completed} requests completed, {failed} failed in {line['duration_s']:.1f} s",
        *(f"  failed: {count} × {kind}{_told(line, kind)}" for kind, count in line["errors"].items()),
    ]
    if line["not_asked"]:
        rows.append(f"  not asked, because an earlier turn had failed: {line['not_asked']}")
    if line["without_text"]:
        rows.append(f"  answers without text: {line['without_text']}")
    tokens = "" if line["tokens_from"] == "usage" else " (pieces; the server counts no tokens)"
    given = f"{line['total_input_tokens']:,}" if line["total_input_tokens"] is not None else "an unknown number of"
    cached = f", {line['cached_tokens']:,} of them cached" if line["cached_tokens"] is not None else ""
    rows += [
        f"  tokens: {given} in{cached}; {line['total_output_tokens']:,} out{tokens}",
        f"  throughput: {line['request_throughput']:.2f} requests/s, {line['output_throughput']:.1f} tokens/s",
    ]
    slos = [("first token", line["ttft_slo_ms"]), ("token to token", line["itl_slo_ms"])]
    told = " and ".join(f"{name} within {value:g} ms" for name, value in slos if value is not None)
    if told:
        rows.append(f"  goodput: {line['request_goodput']:.2f} requests/s with {told}")
    if line["max_late_s"] > 0.1:
        rows.append(f"  some requests were sent up to {line['max_late_s']:.1f} s late: too few may run at once")
    rows.append(f"\n  {'milliseconds':<24}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p95", "p99", "max")))
    for name, title in LATENCIES.items():
        if line[name] is not None:
            rows.append(f"  {title:<24}" + "".join(f"{value:>11,.1f}" for value in line[name].values()))
    return "\n".join(rows)


def _told(line: dict[str, Any], kind: str) -> str:
    detail = line["error_details"].get(kind)
    return f" ({detail})" if detail else ""
