"""What the HTTP APIs share of a request's way: pieces that are there at one moment go out as one."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from localpaged.server.generation import gathered


def test_what_is_there_at_one_moment_is_one_piece_and_the_order_stays() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        for step in range(3):
            for index in range(4):
                yield b"%d%d " % (step, index)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def read() -> list[bytes]:
        return [piece async for piece in gathered(chunks())]

    assert asyncio.run(read()) == [b"00 01 02 03 ", b"10 11 12 13 ", b"20 21 22 23 "]


def test_an_error_comes_behind_what_came_before_it() -> None:
    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise ValueError("broken")

    async def read(got: list[bytes]) -> None:
        async for piece in gathered(chunks()):
            got.append(piece)

    got: list[bytes] = []
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(read(got))
    assert got == [b"a"]


def test_closing_it_closes_the_chunks() -> None:
    closed = asyncio.Event()

    async def chunks() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.sleep(1000)
        finally:
            closed.set()

    async def read() -> None:
        pieces = gathered(chunks())
        assert await anext(pieces) == b"a"
        await pieces.aclose()
        assert closed.is_set()

    asyncio.run(read())
