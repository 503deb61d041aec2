"""The conversations' file: every older schema opens, and a file that cannot be used is refused and left as it is."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlite_utils

from localpaged.errors import StoreError
from localpaged.store.conversation_search import search_conversations
from localpaged.store.database import Database
from localpaged.store.migrations import MIGRATIONS
from localpaged.store.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with closing(Store(path)) as store:
        yield store


@pytest.mark.parametrize("step", [migration.name for migration in MIGRATIONS._migrations])
def test_a_database_of_every_older_schema_opens_with_its_messages(path: Path, step: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        db = sqlite_utils.Database(connection)
        db.enable_wal()
        MIGRATIONS.apply(db, stop_before=step)
        has_tables = "messages" in db.table_names()
        if has_tables:
            db.execute("INSERT INTO conversations (title, created, updated) VALUES ('old', 1, 1)")
            db.execute(
                "INSERT INTO messages (conversation, role, text, state, created)"
                " VALUES (1, 'user', 'needle', 'complete', 1)"
            )
    with closing(Store(path)) as store:
        assert MIGRATIONS.pending(store._database._db) == []
        assert [hit.conversation.title for hit in search_conversations(store.conversations)] == ["old"] * has_tables
        assert len(search_conversations(store.conversations, "needle")) == has_tables


def test_a_newer_database_is_refused_and_left_as_it_is(path: Path) -> None:
    Store(path).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('localpaged', 'm999', '')"
        )
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"newer localpaged \(it has m999\).*Update"):
        Store(path)
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_database_is_refused_and_left_as_it_is(path: Path) -> None:
    path.write_text("These are my notes, not a database. " * 40)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a database"):
        Store(path)
    assert path.read_bytes() == before


def test_the_database_of_another_program_is_refused_and_left_as_it_is(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE recipes (id INTEGER)")
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program .*recipes"):
        Store(path)
    assert path.read_bytes() == before


def test_a_second_localpaged_on_the_same_file_is_refused(store: Store, path: Path) -> None:
    with pytest.raises(StoreError, match="Another localpaged is using"):
        Store(path)


def test_a_database_locked_by_another_program_is_reported_in_bounded_time(path: Path) -> None:
    with closing(Store(path, lock_timeout_s=0.1)) as store, closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another program"):
            store.conversations.create()
        other.execute("ROLLBACK")
        assert store.conversations.create().id == 1


def test_a_full_disk_is_reported_and_what_was_saved_stays(path: Path) -> None:
    with closing(Store(path)) as store:
        conversation = store.conversations.create()
        user = store.conversations.add_user_message(conversation.id, None, "saved")
        connection = store._database._db.conn
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages + 1}")
        with pytest.raises(StoreError, match="full"):
            store.conversations.add_user_message(conversation.id, None, "x" * 100_000)
        connection.execute("PRAGMA max_page_count=1000000")
        turns = store.conversations.branch(conversation.id).turns
        assert [turn.message.id for turn in turns] == [user.id]
        store.conversations.add_user_message(conversation.id, None, "x" * 100_000)


def test_a_read_only_database_is_reported(store: Store) -> None:
    store._database._db.conn.execute("PRAGMA query_only=1")
    with pytest.raises(StoreError, match="read-only"):
        store.conversations.create()


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Database(tmp_path / "file" / "chats.db")
