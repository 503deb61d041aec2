"""A replay as one SVG picture: how latencies are distributed, and what each request did when.

Colours follow the reader's light or dark scheme; nothing is loaded and nothing runs.
"""

import math
from collections.abc import Callable
from html import escape
from typing import Any

from localpaged.load.chat_client import Outcome
from localpaged.load.replay import Replay
from localpaged.load.report import LATENCIES, latencies_ms, percentile

WIDTH, MARGIN, GAP = 960, 56, 58
CHART_HEIGHT, TIMELINE_TOP = 170, 330
# More points than this are not seen, and rows thinner than a pixel neither.
MAX_POINTS, MAX_ROWS = 300, 400
STYLE = """
.bg{fill:#fbfaf8}.ink{fill:#1f1d1a}.soft{fill:#6b665e}.grid{stroke:#e4e0d9}.line{stroke:#2f6f5e;fill:none}
.wait{stroke:#c9b458}.write{stroke:#2f6f5e}.fail{stroke:#b3401a}.mark{stroke:#a8431f;stroke-dasharray:3 3}
@media (prefers-color-scheme:dark){.bg{fill:#171614}.ink{fill:#ece9e3}.soft{fill:#a8a299}.grid{stroke:#35332f}
.line{stroke:#6dbfa4}.wait{stroke:#8f7f36}.write{stroke:#6dbfa4}.fail{stroke:#e5764a}.mark{stroke:#e59a76}}
text{font:12px system-ui,sans-serif}.title{font-size:17px;font-weight:600}.name{font-weight:600}
"""


def draw(replay: Replay, line: dict[str, Any]) -> str:
    """The picture of a replay; line is its report."""
    outcomes = sorted(replay.outcomes, key=lambda outcome: outcome.begin)
    row_height = max(1.5, min(9.0, 420 / max(len(outcomes), 1)))
    height = round(TIMELINE_TOP + 34 + row_height * min(len(outcomes), MAX_ROWS) + 56)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(_title(line))}"><style>{STYLE}</style>',
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>',
        _text(MARGIN, 34, _title(line), "ink title"),
        _text(MARGIN, 56, _subtitle(line), "soft"),
    ]
    samples = latencies_ms(outcomes)
    names = ("ttft_ms", "itl_ms", "e2el_ms")
    width = (WIDTH - 2 * MARGIN - GAP * (len(names) - 1)) / len(names)
    slos = {"ttft_ms": line["ttft_slo_ms"], "itl_ms": line["itl_slo_ms"]}
    for place, name in enumerate(names):
        left = MARGIN + place * (width + GAP)
        parts.append(_distribution(left, 96, width, LATENCIES[name], samples[name], slos.get(name)))
    parts += [_timeline(outcomes, replay.began, row_height, height), "</svg>\n"]
    return "".join(parts)


def _title(line: dict[str, Any]) -> str:
    return f"{line['model']} · {line['work']} · {line['completed']} requests"


def _subtitle(line: dict[str, Any]) -> str:
    parts = [
        f"{line['request_throughput']:.2f} requests/s",
        f"{line['output_throughput']:.1f} tokens/s",
        f"{line['n']} answers each" if line["n"] > 1 else "",
        f"goodput {line['request_goodput']:.2f} requests/s" if line["ttft_slo_ms"] or line["itl_slo_ms"] else "",
        *(f"{count} × {kind}" for kind, count in line["errors"].items()),
    ]
    return " · ".join(part for part in parts if part)


def _distribution(left: float, top: float, width: float, title: str, values: list[float], slo: float | None) -> str:
    """The share of samples up to each value, over a logarithmic axis."""
    parts = [_text(left, top - 10, title, "ink name")]
    bottom = top + CHART_HEIGHT
    for share in (0, 0.5, 1):
        y = bottom - share * CHART_HEIGHT
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}h{width:.1f}"/>')
        parts.append(_text(left - 6, y + 4, f"{share:.0%}", "soft", "end"))
    if not values:
        return "".join([*parts, _text(left + width / 2, top + CHART_HEIGHT / 2, "no samples", "soft", "middle")])
    low, high = max(values[0], 0.01), max(values[-1], 0.01)
    if high < low * 1.5:
        low, high = low / 1.5, high * 1.5
    scale = width / math.log(high / low)

    def x_of(value: float) -> float:
        return left + min(max(math.log(max(value, low) / low) * scale, 0), width)

    for tick in _ticks(low, high):
        parts.append(f'<path class="grid" d="M{x_of(tick):.1f} {top}v{CHART_HEIGHT}"/>')
        parts.append(_text(x_of(tick), bottom + 16, _duration(tick), "soft", "middle"))
    if slo is not None and low <= slo <= high:
        parts.append(f'<path class="mark" d="M{x_of(slo):.1f} {top}v{CHART_HEIGHT}"/>')
    parts.append(f'<path class="line" stroke-width="2" d="{_steps(values, x_of, top)}"/>')
    told = " · ".join(f"p{percent} {_duration(percentile(values, percent))}" for percent in (50, 95, 99))
    parts.append(_text(left, bottom + 36, told, "soft"))
    return "".join(parts)


def _steps(values: list[float], x_of: Callable[[float], float], top: float) -> str:
    count = min(len(values), MAX_POINTS)
    places = [round(index * (len(values) - 1) / max(count - 1, 1)) for index in range(count)]
    bottom = top + CHART_HEIGHT
    path = f"M{x_of(values[0]):.1f} {bottom:.1f}"
    for place in places:
        path += f"H{x_of(values[place]):.1f}V{bottom - (place + 1) / len(values) * CHART_HEIGHT:.1f}"
    return path


def _timeline(outcomes: list[Outcome], began: float, row_height: float, height: int) -> str:
    """A line for each request: waiting for its first token, writing, failed."""
    top = TIMELINE_TOP + 34
    width = WIDTH - 2 * MARGIN
    end = max((outcome.end for outcome in outcomes), default=began) - began or 1.0
    parts = [_text(MARGIN, TIMELINE_TOP + 14, "each request: waiting for its first token, then writing", "ink name")]
    bottom = height - 40
    step = _step(end)
    for index in range(int(end / step) + 1):
        x = MARGIN + index * step / end * width
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(_text(x, bottom + 18, _duration(1000 * index * step), "soft", "middle"))
    stride = math.ceil(len(outcomes) / MAX_ROWS) or 1
    if stride > 1:
        parts.append(_text(WIDTH - MARGIN, TIMELINE_TOP + 14, f"every {stride}. request", "soft", "end"))
    for row, outcome in enumerate(outcomes[::stride]):
        y = top + (row + 0.5) * row_height
        begin, done = (MARGIN + (moment - began) / end * width for moment in (outcome.begin, outcome.end))
        first = done
        if outcome.ttft_s is not None:
            first = MARGIN + (outcome.begin + outcome.ttft_s - began) / end * width
        spans = [("wait", begin, first), ("write", first, done)]
        if outcome.error is not None:
            spans = [("fail", begin, done)]
        for name, one, other in spans:
            if other > one or name == "fail":
                path = f"M{one:.1f} {y:.1f}H{max(other, one + 1):.1f}"
                parts.append(f'<path class="{name}" stroke-width="{row_height * 0.7:.1f}" d="{path}"/>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Few round values between two, for a logarithmic axis."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [base * 10.0**power for power in range(first, last + 1) for base in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 3:
        step = _step(high - low)
        inside = [step * count for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    elif len(inside) > 5:
        inside = [tick for tick in inside if round(math.log10(tick), 6).is_integer()]
    return inside[:: math.ceil(len(inside) / 4) or 1]


def _step(end: float) -> float:
    """A round distance of which there are four to ten until the end."""
    size = 10.0 ** math.floor(math.log10(end))
    return next(size * part for part in (0.1, 0.2, 0.5, 1, 2) if end / (size * part) <= 10)


def _duration(value_ms: float) -> str:
    if value_ms >= 100_000:
        return f"{value_ms / 1000:,.0f} s"
    return f"{value_ms / 1000:.3g} s" if value_ms >= 1000 else f"{value_ms:.3g} ms" if value_ms else "0"


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
