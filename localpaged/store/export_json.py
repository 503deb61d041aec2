"""Conversations as JSON that can be imported again: the versioned file around transcripts, a line for each of them."""

import msgspec

from localpaged.errors import InvalidRequestError
from localpaged.store.transcript import Transcript

FORMAT = "localpaged-conversations"
VERSION = 1


class JsonExport:
    """The file in pieces, so that one conversation at a time is in memory."""

    suffix = ".json"
    media_type = "application/json"

    def __init__(self) -> None:
        self._num_added = 0

    def begin(self) -> bytes:
        return b'{"format":"%s","version":%d,"conversations":[' % (FORMAT.encode(), VERSION)

    def add(self, transcript: Transcript) -> bytes:
        self._num_added += 1
        return (b"\n" if self._num_added == 1 else b",\n") + msgspec.json.encode(transcript)

    def end(self) -> bytes:
        return b"\n]}\n"


class _Head(msgspec.Struct):
    format: str
    version: int


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    conversations: list[Transcript]


def parse_json_export(data: bytes) -> list[Transcript]:
    """The conversations of an exported file. Raises InvalidRequestError, and msgspec's errors, which say where."""
    head = msgspec.json.decode(data, type=_Head)
    if head.version != VERSION:
        raise InvalidRequestError(
            f"The file has version {head.version} of localpaged's format and this localpaged reads {VERSION}."
            " Update localpaged.",
            "body",
        )
    transcripts = msgspec.json.decode(data, type=_File).conversations
    for place, transcript in enumerate(transcripts):
        transcript.check(f"$.conversations[{place}]")
    return transcripts
