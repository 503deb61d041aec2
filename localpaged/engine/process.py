"""The engine's own process: `python -m localpaged.engine.process FD`, with a socket to its parent at FD.

The first frame is the EngineConfig; then commands come in and replies go out. It ends when the
socket closes, however the parent died.
"""

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from localpaged.engine.build import Engine, build_engine
from localpaged.engine.config import EngineConfig
from localpaged.engine.messages import (
    AskEstimate,
    AskResidency,
    AskStats,
    Cancel,
    ChooseLease,
    Command,
    DropLeases,
    Estimated,
    Generate,
    PinConversation,
    Ready,
    Reply,
    Residencies,
    Shutdown,
    StartFailed,
    Stats,
    Warm,
)
from localpaged.engine.wire import decode_commands, encode, receive
from localpaged.errors import LocalpagedError
from localpaged.log import log_to

logger = logging.getLogger(__name__)


def main(fd: int) -> None:
    """Serve one engine over the socket until it closes or Shutdown comes."""
    # Ctrl-C in the terminal goes to the whole group; the server decides what ends when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    body = receive(connection)
    if body is None:
        return
    config = msgspec.msgpack.decode(body, type=EngineConfig)
    log_to(Path(config.log_folder) if config.log_folder is not None else None, "engine", config.log_level)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True).start()
    try:
        engine = build_engine(config)
    except (LocalpagedError, MemoryError) as error:
        connection.sendall(encode([StartFailed(str(error) or "There is not enough memory for this model.")]))
        return
    except Exception as error:
        logger.exception("The model could not be loaded")
        connection.sendall(encode([StartFailed(f"The model could not be loaded: {error!r}")]))
        return
    connection.sendall(encode([Ready(engine.info)]))
    serve(engine, commands, connection)


def serve(engine: Engine, commands: "queue.SimpleQueue[Command]", connection: socket.socket) -> None:
    """Take commands between steps and run steps while there is work."""
    core = engine.core
    while True:
        replies: list[Reply] = []
        while not commands.empty() or not (core.has_work or replies):
            command = commands.get()
            if isinstance(command, Shutdown):
                core.sessions.close()
                return
            replies += _carry_out(engine, command)
        if core.has_work:
            replies += core.step()
        if replies:
            connection.sendall(encode(replies))


def _carry_out(engine: Engine, command: Command) -> Sequence[Reply]:
    core = engine.core
    match command:
        case Generate():
            return core.submit(command)
        case Cancel():
            return core.cancel(command.request_id, command.index)
        case AskStats():
            return [Stats(command.call_id, core.stats())]
        case AskResidency():
            return [Residencies(command.call_id, core.sessions.residency())]
        case AskEstimate():
            price = core.sessions.estimate(command.token_ids, command.conversation, command.n, command.max_tokens)
            return [Estimated(command.call_id, price)]
        case ChooseLease():
            core.sessions.choose(command.lease_id)
        case Warm():
            core.sessions.warm(command.conversation, command.token_ids)
        case PinConversation():
            core.leases.pin(command.conversation, command.pinned)
        case DropLeases():
            core.sessions.drop(command.conversation, command.lease_ids)
        case Shutdown():
            raise AssertionError("serve() ends at Shutdown")
    return []


def _read_commands(connection: socket.socket, commands: "queue.SimpleQueue[Command]") -> None:
    while (body := receive(connection)) is not None:
        for command in decode_commands(body):
            commands.put(command)
    # The parent is gone, and with it everyone who could want an answer.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
