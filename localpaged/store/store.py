"""The server's way to the conversations: every call runs on one thread, in order, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from localpaged.store.conversations import Conversations
from localpaged.store.database import Database

P = ParamSpec("P")
R = TypeVar("R")


class Store:
    """An open conversation database.

    Opening it marks what a killed server left running as interrupted and drops what was deleted.
    Raises StoreError when the file cannot be used.
    """

    def __init__(self, path: Path, lock_timeout_s: float = 5.0) -> None:
        self._database = Database(path, lock_timeout_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self.conversations = Conversations(self._database)
        try:
            self.conversations.interrupt_running()
            self.conversations.purge_deleted()
        except BaseException:
            self.close()
            raise

    async def do(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Await a method of the conversations: `await store.do(store.conversations.get, 3)`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(*args, **kwargs))

    def close(self) -> None:
        """Finish what is queued and close the file."""
        self._thread.shutdown(wait=True)
        self._database.close()
