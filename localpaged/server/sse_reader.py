"""The data of server-sent events, out of bytes as they come.

Splits at line ends alone: JSON may hold other characters that str.splitlines() takes for one (U+2028).
Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream.
"""

from collections.abc import AsyncIterator

MAX_EVENT_BYTES = 16 << 20


async def read_events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield each event's data. Raises ValueError for one that is too long or not UTF-8.

    The last one counts without the empty line after it too, which some servers leave out.
    """
    rest = b""
    data: list[bytes] = []
    async for piece in pieces:
        # A "\r" at the end may be half of a line's end.
        rest += piece
        if len(rest) + sum(map(len, data)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES:,} bytes")
        held = rest.endswith(b"\r")
        lines = (rest[:-1] if held else rest).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        rest = lines.pop() + (b"\r" if held else b"")
        for line in lines:
            if not line and data:
                yield b"\n".join(data).decode()
                data = []
            elif line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
    if rest.startswith(b"data:"):
        data.append(rest[5:].removeprefix(b" ").rstrip(b"\r"))
    if data:
        yield b"\n".join(data).decode()
