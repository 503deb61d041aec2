"""The schema as ordered steps. A released step is never edited; a change is a further step."""

import sqlite_utils
from sqlite_utils.migrations import Migrations

MIGRATIONS = Migrations("localpaged")


@MIGRATIONS()
def m001_conversations_and_messages(db: sqlite_utils.Database) -> None:
    db.execute("""
        CREATE TABLE conversations (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            title TEXT NOT NULL DEFAULT '',
            system_prompt TEXT NOT NULL DEFAULT '',
            settings TEXT NOT NULL DEFAULT '{}',
            pinned INTEGER NOT NULL DEFAULT 0,
            chosen_root INTEGER REFERENCES messages(id) ON DELETE SET NULL,
            created REAL NOT NULL,
            updated REAL NOT NULL
        )
    """)
    db.execute("""
        CREATE TABLE messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            conversation INTEGER NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
            parent INTEGER REFERENCES messages(id) ON DELETE CASCADE,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            text TEXT NOT NULL,
            state TEXT NOT NULL CHECK (state IN ('complete', 'running', 'interrupted', 'error')),
            token_ids BLOB NOT NULL DEFAULT x'',
            num_kept_tokens INTEGER,
            candidate INTEGER,
            chosen_child INTEGER REFERENCES messages(id) ON DELETE SET NULL,
            model TEXT,
            sampling TEXT,
            finish_reason TEXT,
            error TEXT,
            timings TEXT,
            created REAL NOT NULL
        )
    """)
    db.execute("CREATE INDEX messages_conversation ON messages(conversation)")
    db.execute("CREATE INDEX messages_parent ON messages(parent)")
    db.execute("CREATE INDEX messages_chosen_child ON messages(chosen_child)")
    db.execute("CREATE INDEX conversations_chosen_root ON conversations(chosen_root)")


@MIGRATIONS()
def m002_search(db: sqlite_utils.Database) -> None:
    for table, column in (("conversations", "title"), ("messages", "text")):
        db[table].enable_fts([column], tokenize="unicode61 remove_diacritics 2")
        # enable_fts's own triggers fire on every update; a choice or a flag must not rewrite the index.
        insert = f"INSERT INTO {table}_fts (rowid, {column}) VALUES (new.rowid, new.{column});"
        remove = f"INSERT INTO {table}_fts ({table}_fts, rowid, {column}) VALUES ('delete', old.rowid, old.{column});"
        db.execute(f"CREATE TRIGGER {table}_ai AFTER INSERT ON {table} BEGIN {insert} END")
        db.execute(f"CREATE TRIGGER {table}_ad AFTER DELETE ON {table} BEGIN {remove} END")
        db.execute(f"CREATE TRIGGER {table}_au AFTER UPDATE OF {column} ON {table} BEGIN {remove} {insert} END")


@MIGRATIONS()
def m003_deleted_conversations_can_come_back(db: sqlite_utils.Database) -> None:
    db.execute("ALTER TABLE conversations ADD COLUMN deleted REAL")


@MIGRATIONS()
def m004_kv_can_be_pinned(db: sqlite_utils.Database) -> None:
    db.execute("ALTER TABLE conversations ADD COLUMN kv_pinned INTEGER NOT NULL DEFAULT 0")


@MIGRATIONS()
def m005_conversations_have_an_owner(db: sqlite_utils.Database) -> None:
    # Empty: whoever has the server's own key, or nobody in particular.
    db.execute("ALTER TABLE conversations ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
    db.execute("CREATE INDEX conversations_owner ON conversations(owner)")


@MIGRATIONS()
def m006_conversations_can_be_archived(db: sqlite_utils.Database) -> None:
    db.execute("ALTER TABLE conversations ADD COLUMN archived INTEGER NOT NULL DEFAULT 0")
