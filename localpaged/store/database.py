"""The conversations' SQLite file: opened by one process, written through one connection.

Knows nothing of what the tables mean. WAL with synchronous=FULL, so that what was committed
survives a kill and a power cut. Sources: https://sqlite.org/wal.html, https://sqlite.org/rescode.html.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlite_utils
from filelock import FileLock, Timeout

from localpaged.errors import InvalidRequestError, StoreError
from localpaged.store.migrations import MIGRATIONS


class StoreInUseError(StoreError):
    """Another process has the database open."""


class Database:
    """An open database of the newest schema. Raises StoreError when the file cannot be used."""

    def __init__(self, path: Path, lock_timeout_s: float = 5.0) -> None:
        self.path = path
        self._lock = _lock_for_this_process(path)
        try:
            with reported(path):
                self._db = _connect(path, lock_timeout_s)
        except BaseException:
            self._lock.release()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Takes the write lock at once, so that reads inside stay true."""
        with reported(self.path):
            self._db.conn.execute("BEGIN IMMEDIATE")
            try:
                yield self._db.conn
                self._db.conn.execute("COMMIT")
            except BaseException:
                self._db.rollback()
                raise

    def rows(self, sql: str, values: list[Any] | dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The rows of a query as dictionaries."""
        with reported(self.path):
            return list(self._db.query(sql, values))

    def close(self) -> None:
        self._db.close()
        self._lock.release()


def _lock_for_this_process(path: Path) -> FileLock:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock", thread_local=False)
        lock.acquire(timeout=0.5)
    except Timeout as error:
        raise StoreInUseError(
            f"Another localpaged is using {path}. Stop it, or set another LOCALPAGED_HOME for this one."
        ) from error
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written ({error.strerror}). Change its permissions, or set another"
            " LOCALPAGED_HOME."
        ) from error
    return lock


def _connect(path: Path, lock_timeout_s: float) -> sqlite_utils.Database:
    connection = sqlite3.connect(path, timeout=lock_timeout_s, check_same_thread=False)
    try:
        db = sqlite_utils.Database(connection, execute_plugins=False)
        _refuse_what_is_not_ours(db, path)
        db.enable_wal()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        MIGRATIONS.apply(db)
    except BaseException:
        connection.close()
        raise
    return db


def _refuse_what_is_not_ours(db: sqlite_utils.Database, path: Path) -> None:
    tables = db.table_names()
    applied = {migration.name for migration in MIGRATIONS.applied(db)}
    if tables and not applied and tables != [MIGRATIONS.migrations_table]:
        raise StoreError(
            f"{path} is the database of another program (its tables: {', '.join(tables[:4])}). Move it away,"
            " or set another LOCALPAGED_HOME. Nothing was changed."
        )
    known = {migration.name for migration in MIGRATIONS._migrations}
    if applied - known:
        raise StoreError(
            f"{path} was written by a newer localpaged (it has {', '.join(sorted(applied - known))}). Update"
            " localpaged, or set another LOCALPAGED_HOME. Nothing was changed."
        )


@contextmanager
def reported(path: Path) -> Iterator[None]:
    """Turn what SQLite raises into a StoreError that says the fact and the remedy."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except OverflowError as error:
        raise InvalidRequestError("A number of the request is too large for an id.") from error
    except sqlite3.Error as error:
        raise StoreError(_explain(error, path)) from error


def _explain(error: sqlite3.Error, path: Path) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return (
            f"{path} is locked by another program. Close what has it open (a database browser, a backup) and try again."
        )
    if name.startswith("SQLITE_NOTADB"):
        return (
            f"{path} is not a database. Move it away to start a new one, or restore it from a backup."
            " Nothing was changed."
        )
    if name.startswith("SQLITE_CORRUPT"):
        return (
            f"{path} is damaged. Copy it, then recover what is readable with: "
            f'sqlite3 "{path}" .recover | sqlite3 recovered.db'
        )
    if name.startswith("SQLITE_FULL"):
        return f"The disk that holds {path} is full. Free some space and try again; what was saved is intact."
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM")):
        return f"{path} is read-only. Change its permissions, or set another LOCALPAGED_HOME."
    if name.startswith("SQLITE_CANTOPEN"):
        return f"{path} cannot be opened. Check that it is a file you may read and write."
    if name.startswith("SQLITE_IOERR"):
        return f"The disk failed while using {path} ({error}). Check the disk and its free space."
    return f"{path} cannot be used: {error}."
