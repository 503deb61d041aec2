"""Server-sent events out of bytes, wherever the network cuts them."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localpaged.server import sse_reader
from localpaged.server.sse_reader import read_events

SENT = (
    b": a comment\n\n"
    b"data: one\r\n\r\n"
    b"event: message\rdata:two\rdata: lines\r\r"
    b"id: 7\r\ndata: three\r\ndata: lines\r\n\r\n\r\n" + "data: a\u2028b\x85c\n\n".encode() + b"data: last"
)
DATA = ["one", "two\nlines", "three\nlines", "a\u2028b\x85c", "last"]


def events_of(pieces: list[bytes]) -> list[str]:
    async def coming() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def read() -> list[str]:
        return [data async for data in read_events(coming())]

    return asyncio.run(read())


@given(st.sets(st.integers(0, len(SENT))))
def test_events_arrive_whole_wherever_they_are_cut(places: set[int]) -> None:
    cuts = [0, *sorted(places), len(SENT)]
    assert events_of([SENT[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]) == DATA


def test_an_event_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_reader, "MAX_EVENT_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        events_of([b"data: " + b"x" * 600, b"x" * 600])
