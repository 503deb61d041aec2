"""The streams of every API have the shapes that the APIs' own documentation gives: keys, types and order.

tests/data/streams/*.json are written from the documentation, not from what this server says. A type is "string",
"integer", "number", "boolean", "null" or "object", "=x" the text or truth x itself, "a|b" either; [p] a list of such,
"key?" may be absent, "...": true admits further keys. `each` is the order of chunks of each choice, `after` of those
without a choice, or of all where no chunk has one.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import MODEL, ApiEngine, PlainTokenizer, serving

from localpaged.engine.messages import Delta, Event, PositionLogprobs, TokenLogprob
from localpaged.engine.sampling_params import SamplingParams

RECORDED = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "data/streams").glob("*.json")}
CASES = [(name, case) for name, recorded in sorted(RECORDED.items()) for case in recorded["cases"]]
CALL = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "sea"}}\n</tool_call>'
TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict}


class NamingTokenizer(PlainTokenizer):
    """Names its tokens for reports of log-probabilities."""

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class LogprobEngine(ApiEngine):
    """Reports log-probabilities where they are asked for."""

    def __init__(self) -> None:
        super().__init__(answer=lambda prompt, _: CALL if "<tools>" in prompt else "Some words.")
        self.tokenizer = NamingTokenizer()

    async def _stopping(self, events: AsyncIterator[Event], params: SamplingParams) -> AsyncIterator[Event]:
        async for event in super()._stopping(events, params):
            if isinstance(event, Delta) and params.logprobs is not None:
                found = [TokenLogprob(token_id, -0.5, 1) for token_id in event.token_ids]
                event.logprobs = [PositionLogprobs(one, [one] * params.logprobs) for one in found]
            yield event


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("shapes"), LogprobEngine()) as address:
        yield address


def fits(pattern: Any, value: Any) -> bool:
    """Whether a value has a shape."""
    if isinstance(pattern, list):
        if not isinstance(value, list):
            return False
        return all(fits(pattern[0], one) for one in value) if pattern else value == []
    if isinstance(pattern, dict):
        if not isinstance(value, dict):
            return False
        known = {name.removesuffix("?"): one for name, one in pattern.items() if name != "..."}
        needed = {name for name in pattern if not name.endswith("?") and name != "..."}
        if not needed <= set(value) or ("..." not in pattern and not set(value) <= set(known)):
            return False
        return all(fits(known[name], one) for name, one in value.items() if name in known)
    return any(_is(kind, value) for kind in pattern.split("|"))


def _is(kind: str, value: Any) -> bool:
    if kind.startswith("="):
        return kind[1:] == (json.dumps(value) if isinstance(value, bool) else value)
    if kind == "null":
        return value is None
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def events_of(text: str, frame: str, end: str | None) -> list[Any]:
    """The events of a stream, whose framing is checked."""
    if frame == "line":
        assert text.endswith("\n") and "\n\n" not in text
        return [json.loads(line) for line in text.splitlines()]
    assert text.endswith("\n\n")
    blocks = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    if frame == "event":
        assert all(len(block) == 2 and block[0].startswith("event: ") for block in blocks)
        found = [json.loads(block[1].removeprefix("data: ")) for block in blocks]
        assert [block[0].removeprefix("event: ") for block in blocks] == [event["type"] for event in found]
        return found
    assert all(len(block) == 1 and block[0].startswith("data: ") for block in blocks)
    assert blocks.pop() == [f"data: {end}"]
    return [json.loads(block[0].removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_stream_has_the_documented_chunks_in_the_documented_order(server: str, name: str, case: str) -> None:
    recorded = RECORDED[name]
    expected = recorded["cases"][case]
    body = {"model": MODEL, "stream": True} | expected["body"]
    answer = httpx.post(server + expected.get("path", recorded["path"]), json=body)
    assert answer.status_code == 200, answer.text
    kind = "application/x-ndjson" if recorded["frame"] == "line" else "text/event-stream"
    assert answer.headers["content-type"].split(";")[0] == kind
    events = events_of(answer.text, recorded["frame"], recorded["end"])
    each: dict[int, list[str]] = {}
    after: list[str] = []
    for event in events:
        shape = next((shape for shape, pattern in expected["chunks"].items() if fits(pattern, event)), None)
        assert shape is not None, f"no documented shape: {json.dumps(event)}"
        choices = event.get("choices") or []
        # What is of no choice comes after all of them.
        assert not (after and choices)
        (each.setdefault(choices[0]["index"], []) if choices else after).append(shape)
    assert re.fullmatch(expected["after"], " ".join(after)), after
    if expected["each"] is not None:
        assert sorted(each) == list(range(expected.get("choices", 1)))
        for shapes in each.values():
            assert re.fullmatch(expected["each"], " ".join(shapes)), shapes
    for constant in ("id", "created", "model"):
        assert len({json.dumps(event.get(constant)) for event in events if "choices" in event}) <= 1
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))


def test_a_wrong_shape_is_told_from_a_right_one() -> None:
    pattern = {"a": "=x|null", "b?": ["integer"], "c": {"d": "number", "...": True}}
    assert fits(pattern, {"a": None, "c": {"d": 1.5, "e": 2}}) and fits(pattern, {"a": "x", "b": [], "c": {"d": 1}})
    for wrong in ({"a": "y", "c": {"d": 1}}, {"a": "x", "c": {}}, {"a": "x", "c": {"d": 1}, "z": 1}, {"a": "x"}, []):
        assert not fits(pattern, wrong)
    assert not fits({"a": "integer"}, {"a": True}) and not fits({"a": []}, {"a": [1]})
