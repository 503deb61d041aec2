"""Conversations for tests: random transcripts, and the store that they go through."""

import json
from typing import Any

import msgspec
from hypothesis import strategies as st

from localpaged.store.message import pack_token_ids
from localpaged.store.transcript import ABSENT, Transcript, TranscriptMessage, TranscriptTimings

TEXTS = st.text(max_size=30) | st.sampled_from(["", "```\nopen", "# x\n---\n", "a\0b", "\x02\x03", "🐙", "<!-- "])
MOMENTS = st.floats(0, 4e9)
OBJECTS = st.dictionaries(
    st.text(max_size=4),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
)


def json_object(value: dict[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


@st.composite
def transcripts(draw: st.DrawFn) -> Transcript:
    """Any tree, any choice, any state."""
    messages: list[TranscriptMessage] = []
    for number in range(1, draw(st.integers(0, 8)) + 1):
        role = draw(st.sampled_from(["user", "assistant"]))
        ids = draw(st.lists(st.integers(0, 2**32 - 1), max_size=4))
        timings = st.builds(TranscriptTimings, ttft_s=st.none() | MOMENTS, num_tokens=st.integers(0, 99))
        messages.append(
            TranscriptMessage(
                id=number,
                parent=draw(st.none() | st.integers(1, number - 1)) if number > 1 else None,
                role=role,
                text=draw(TEXTS),
                state=draw(st.sampled_from(["complete", "interrupted", "error"])),
                created=draw(MOMENTS),
                token_ids=pack_token_ids(ids),
                num_kept_tokens=draw(st.none() | st.integers(0, 9)),
                candidate=draw(st.none() | st.integers(0, 7)),
                model=draw(st.none() | TEXTS),
                sampling=draw(st.just(ABSENT) | st.builds(json_object, OBJECTS)),
                finish_reason=draw(st.sampled_from([None, "stop", "length"])),
                error=draw(st.none() | TEXTS),
                timings=draw(st.none() | timings),
            )
        )
    for message in messages:
        children = [one.id for one in messages if one.parent == message.id]
        message.chosen_child = draw(st.sampled_from([None, *children]))
    roots = [one.id for one in messages if one.parent is None]
    return Transcript(
        title=draw(TEXTS),
        system_prompt=draw(TEXTS),
        settings=draw(st.builds(json_object, OBJECTS)),
        pinned=draw(st.booleans()),
        kv_pinned=draw(st.booleans()),
        archived=draw(st.booleans()),
        created=draw(MOMENTS),
        updated=draw(MOMENTS),
        chosen_root=draw(st.sampled_from([None, *roots])),
        messages=messages,
    )
