"""Conversations as trees of messages. Knows SQLite's tables; nothing of models, engines or HTTP."""

import json
import time
from typing import Any

import msgspec

from localpaged.errors import InvalidRequestError
from localpaged.store.database import Database
from localpaged.store.message import (
    Branch,
    Conversation,
    Message,
    NotFoundError,
    Role,
    State,
    Turn,
    pack_token_ids,
)
from localpaged.store.rows import conversation_of, message_of

_UPDATABLE = {"title", "system_prompt", "settings", "pinned", "kv_pinned", "archived"}


class Conversations:
    """Every method is one transaction. Raises StoreError for the file, InvalidRequestError for ids.

    owner: the user whose conversations these are, others are as if they were not there; None: everybody's.
    """

    def __init__(self, database: Database, owner: str | None = None) -> None:
        self._db = database
        self.owner = owner

    def of(self, owner: str) -> "Conversations":
        """One user's."""
        return Conversations(self._db, owner)

    @property
    def mine(self) -> str:
        """The condition for rows of conversations; its value is `owner`."""
        return "(:owner IS NULL OR conversations.owner = :owner)"

    @property
    def database(self) -> Database:
        return self._db

    # Conversations

    def create(self, title: str = "", system_prompt: str = "", settings: dict[str, Any] | None = None) -> Conversation:
        now = time.time()
        row = {"title": title, "system_prompt": system_prompt, "settings": json.dumps(settings or {})}
        with self._db.transaction() as connection:
            conversation_id = self.insert(connection, row | {"created": now, "updated": now})
        return self.get(conversation_id)

    def insert(self, connection: Any, row: dict[str, Any]) -> int:
        """Add a conversation's row within a transaction; its id."""
        row = row | {"owner": self.owner or ""}
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        cursor = connection.execute(f"INSERT INTO conversations ({names}) VALUES ({marks})", tuple(row.values()))
        return int(cursor.lastrowid)

    def get(self, conversation_id: int) -> Conversation:
        rows = self._db.rows(
            f"SELECT * FROM conversations WHERE id = :id AND deleted IS NULL AND {self.mine}",
            {"id": conversation_id, "owner": self.owner},
        )
        if not rows:
            raise NotFoundError(
                f"There is no conversation {conversation_id}. It was deleted, or the address is wrong.",
                "conversation",
            )
        return conversation_of(rows[0])

    def count(self) -> int:
        rows = self._db.rows(
            f"SELECT count(*) AS n FROM conversations WHERE deleted IS NULL AND {self.mine}", {"owner": self.owner}
        )
        return int(rows[0]["n"])

    def with_pinned_kv(self) -> list[int]:
        """The conversations whose KV is to be the last to go."""
        rows = self._db.rows("SELECT id FROM conversations WHERE (pinned OR kv_pinned) AND deleted IS NULL")
        return [row["id"] for row in rows]

    def update(self, conversation_id: int, **fields: Any) -> Conversation:
        """Change title, system_prompt, settings, pinned, kv_pinned or archived."""
        unknown = fields.keys() - _UPDATABLE
        assert not unknown, unknown
        self.get(conversation_id)
        if "settings" in fields:
            fields["settings"] = json.dumps(fields["settings"])
        if fields:
            assignments = ", ".join(f"{name} = ?" for name in fields)
            with self._db.transaction() as connection:
                connection.execute(
                    f"UPDATE conversations SET {assignments} WHERE id = ?",
                    (*fields.values(), conversation_id),
                )
        return self.get(conversation_id)

    def first_text(self, conversation_id: int) -> str:
        """What the conversation began with; empty before that."""
        rows = self._db.rows(
            "SELECT text FROM messages WHERE conversation = ? AND parent IS NULL ORDER BY id LIMIT 1", [conversation_id]
        )
        return str(rows[0]["text"]) if rows else ""

    def delete(self, conversation_id: int) -> None:
        """Hide a conversation; restore() brings it back until purge_deleted() drops it."""
        self.get(conversation_id)
        with self._db.transaction() as connection:
            connection.execute("UPDATE conversations SET deleted = ? WHERE id = ?", (time.time(), conversation_id))

    def restore(self, conversation_id: int) -> Conversation:
        with self._db.transaction() as connection:
            connection.execute(
                f"UPDATE conversations SET deleted = NULL WHERE id = :id AND {self.mine}",
                {"id": conversation_id, "owner": self.owner},
            )
        return self.get(conversation_id)

    def purge_deleted(self, older_than_s: float = 0.0) -> int:
        """Drop deleted conversations for good; the number dropped."""
        before = time.time() - older_than_s
        with self._db.transaction() as connection:
            _drop_messages(connection, "conversation IN (SELECT id FROM conversations WHERE deleted <= ?)", before)
            return connection.execute("DELETE FROM conversations WHERE deleted <= ?", (before,)).rowcount

    # Messages

    def message(self, message_id: int) -> Message:
        rows = self._db.rows(
            "SELECT messages.* FROM messages JOIN conversations ON conversations.id = conversation"
            f" WHERE messages.id = :id AND deleted IS NULL AND {self.mine}",
            {"id": message_id, "owner": self.owner},
        )
        if not rows:
            raise NotFoundError(
                f"There is no message {message_id}. It was deleted, or the address is wrong.", "message"
            )
        return message_of(rows[0])

    def add_user_message(self, conversation_id: int, parent: int | None, text: str) -> Message:
        """Add a user message under an answer, or as a root, and show it."""
        return self.add_turns(conversation_id, parent, [("user", text)])

    def add_turns(self, conversation_id: int, parent: int | None, turns: list[tuple[Role, str]]) -> Message:
        """Add (role, text) messages, each under the one before, the first under parent; show and return the last."""
        self.get(conversation_id)
        if parent is not None and self.message(parent).conversation != conversation_id:
            raise InvalidRequestError(f"Message {parent} is not part of conversation {conversation_id}.", "parent")
        with self._db.transaction() as connection:
            for role, text in turns:
                parent = _insert(connection, conversation_id, parent, role, text, "complete")
                _show(connection, parent)
        assert parent is not None
        return self.message(parent)

    def add_candidates(self, parent: int, count: int, model: str | None, sampling: dict[str, Any]) -> list[Message]:
        """Add running, empty answers under a user message.

        A single one is shown at once; among several nothing is chosen, so that the choice is open.
        Earlier answers that failed before their first word are dropped.
        """
        user = self.message(parent)
        with self._db.transaction() as connection:
            connection.execute(
                "DELETE FROM messages WHERE parent = ? AND text = '' AND state IN ('error', 'interrupted')",
                (parent,),
            )
            ids = [
                _insert(
                    connection,
                    user.conversation,
                    parent,
                    "assistant",
                    "",
                    "running",
                    candidate=index,
                    model=model,
                    sampling=json.dumps(sampling),
                )
                for index in range(count)
            ]
            _show(connection, parent)
            _choose(connection, user.conversation, parent, ids[0] if count == 1 else None)
        return [self.message(message_id) for message_id in ids]

    def save_messages(self, messages: list[Message]) -> None:
        """Write text, token ids, state and figures of messages that exist. All or none."""
        with self._db.transaction() as connection:
            for message in messages:
                timings = msgspec.json.encode(message.timings).decode() if message.timings else None
                connection.execute(
                    "UPDATE messages SET text = ?, token_ids = ?, num_kept_tokens = ?, state = ?, model = ?,"
                    " finish_reason = ?, error = ?, timings = ? WHERE id = ?",
                    (
                        message.text,
                        pack_token_ids(message.token_ids),
                        message.num_kept_tokens,
                        message.state,
                        message.model,
                        message.finish_reason,
                        message.error,
                        timings,
                        message.id,
                    ),
                )

    def choose(self, message_id: int) -> Message:
        """Show the branch that this message is on; what follows it is shown as it was last."""
        message = self.message(message_id)
        with self._db.transaction() as connection:
            _show(connection, message_id)
        return message

    def reopen_choice(self, message_id: int) -> Message:
        """Forget which answer to a user message was chosen; all of them stay."""
        message = self.message(message_id)
        if message.role != "user":
            raise InvalidRequestError("Only the answers to a user message can be chosen among.", "message")
        with self._db.transaction() as connection:
            _choose(connection, message.conversation, message_id, None)
        return message

    def delete_messages(self, message_ids: list[int]) -> None:
        """Drop messages and everything under them; where one was shown its latest sibling is."""
        for message_id in message_ids:
            message = self.message(message_id)
            under = json.dumps(self.subtree(message_id))
            with self._db.transaction() as connection:
                _drop_messages(connection, "id IN (SELECT value FROM json_each(?))", under)
                if message.parent is None:
                    connection.execute(
                        "UPDATE conversations SET chosen_root = coalesce(chosen_root,"
                        " (SELECT max(id) FROM messages WHERE conversation = ?1 AND parent IS NULL))"
                        " WHERE id = ?1",
                        (message.conversation,),
                    )

    def subtree(self, message_id: int) -> list[int]:
        """The ids of a message and of everything under it."""
        rows = self._db.rows(
            "WITH RECURSIVE under AS (SELECT ? AS id UNION ALL"
            " SELECT messages.id FROM messages JOIN under ON messages.parent = under.id) SELECT id FROM under",
            [message_id],
        )
        return [row["id"] for row in rows]

    def interrupt_running(self) -> int:
        """Mark what runs as interrupted, with the text it has; the number marked."""
        with self._db.transaction() as connection:
            return connection.execute("UPDATE messages SET state = 'interrupted' WHERE state = 'running'").rowcount

    # Branches

    def path_to(self, message_id: int | None) -> list[Message]:
        """The messages from the root to this one. Empty for None."""
        if message_id is None:
            return []
        self.message(message_id)
        rows = self._db.rows(
            "WITH RECURSIVE path AS ("
            " SELECT messages.*, 0 AS height FROM messages WHERE id = ?"
            " UNION ALL SELECT messages.*, height + 1 FROM messages JOIN path ON messages.id = path.parent"
            ") SELECT * FROM path ORDER BY height DESC",
            [message_id],
        )
        return [message_of(row) for row in rows]

    def branch(self, conversation_id: int, limit: int | None = None, before: int | None = None) -> Branch:
        """What a conversation shows: the last `limit` messages of its branch, or those before a message.

        The choice at each fork is followed. Without one, an only child and the latest of several
        user messages are taken; at several answers the branch ends and they are open_candidates.
        """
        self.get(conversation_id)
        rows = self._db.rows(
            "SELECT id, parent, role, state, chosen_child FROM messages WHERE conversation = ? ORDER BY id",
            [conversation_id],
        )
        chosen_root = self.get(conversation_id).chosen_root
        children: dict[int | None, list[dict[str, Any]]] = {}
        for row in rows:
            children.setdefault(row["parent"], []).append(row)
        path: list[tuple[int, list[int]]] = []
        open_ids: list[int] = []
        parent: int | None = None
        choice = chosen_root
        while siblings := children.get(parent, []):
            ids: list[int] = [row["id"] for row in siblings]
            if choice is None or choice not in ids:
                if siblings[-1]["role"] == "assistant" and len(ids) > 1:
                    open_ids = ids
                    break
                choice = ids[-1]
            path.append((choice, ids))
            parent = choice
            choice = siblings[ids.index(choice)]["chosen_child"]
        if before is not None:
            places = [place for place, (message_id, _) in enumerate(path) if message_id == before]
            path, open_ids = path[: places[0]] if places else [], []
        num_earlier = max(0, len(path) - limit) if limit is not None else 0
        path = path[num_earlier:]
        messages = self._messages([message_id for message_id, _ in path] + open_ids)
        return Branch(
            turns=[Turn(message=messages[message_id], sibling_ids=ids) for message_id, ids in path],
            open_candidates=[messages[message_id] for message_id in open_ids],
            num_earlier=num_earlier,
        )

    def _messages(self, ids: list[int]) -> dict[int, Message]:
        rows = self._db.rows("SELECT * FROM messages WHERE id IN (SELECT value FROM json_each(?))", [json.dumps(ids)])
        return {row["id"]: message_of(row) for row in rows}


def _insert(
    connection: Any, conversation: int, parent: int | None, role: Role, text: str, state: State, **more: Any
) -> int:
    now = time.time()
    row = {"conversation": conversation, "parent": parent, "role": role, "text": text, "state": state}
    row |= {"created": now} | more
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    cursor = connection.execute(f"INSERT INTO messages ({names}) VALUES ({marks})", tuple(row.values()))
    connection.execute("UPDATE conversations SET updated = ?, archived = 0 WHERE id = ?", (now, conversation))
    return int(cursor.lastrowid)


def _drop_messages(connection: Any, condition: str, value: Any) -> None:
    """Drop messages, with everything under them.

    Taken apart first: SQLite follows a cascade over a thousand messages at most, and slowly.
    """
    connection.execute(f"UPDATE messages SET parent = NULL WHERE {condition}", (value,))
    connection.execute(f"DELETE FROM messages WHERE {condition}", (value,))


def _choose(connection: Any, conversation: int, parent: int | None, child: int | None) -> None:
    if parent is None:
        connection.execute("UPDATE conversations SET chosen_root = ? WHERE id = ?", (child, conversation))
    else:
        connection.execute("UPDATE messages SET chosen_child = ? WHERE id = ?", (child, parent))


def _show(connection: Any, message_id: int) -> None:
    """Choose a message and everything above it."""
    child: int | None = message_id
    while child is not None:
        conversation, parent = connection.execute(
            "SELECT conversation, parent FROM messages WHERE id = ?", (child,)
        ).fetchone()
        _choose(connection, conversation, parent, child)
        child = parent
