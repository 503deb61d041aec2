"""Frames on the socket between the server and an engine process: a length, then msgpack.

One frame carries a list of messages, so that a step's events travel together.
"""

import socket
import struct
from collections.abc import Sequence

import msgspec

from localpaged.engine.messages import Command, Reply

HEADER = struct.Struct(">I")

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_replies = msgspec.msgpack.Decoder(list[Reply])


def encode(messages: Sequence[Command | Reply]) -> bytes:
    """One frame."""
    body = _encoder.encode(list(messages))
    return HEADER.pack(len(body)) + body


def decode_commands(body: bytes) -> list[Command]:
    return _commands.decode(body)


def decode_replies(body: bytes) -> list[Reply]:
    return _replies.decode(body)


def receive(connection: socket.socket) -> bytes | None:
    """The body of the next frame, waiting for it; None when the other side is gone."""
    header = _receive_exactly(connection, HEADER.size)
    return None if header is None else _receive_exactly(connection, HEADER.unpack(header)[0])


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except ConnectionError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
