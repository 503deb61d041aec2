"""Conversations out of the store and into it again: nothing lost, nothing half done."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transcripts import transcripts

from localpaged.errors import InvalidRequestError, StoreError
from localpaged.store.conversation_search import search_conversations
from localpaged.store.conversations import Conversations
from localpaged.store.export_json import JsonExport
from localpaged.store.import_file import parse_file
from localpaged.store.store import Store
from localpaged.store.transcript import Transcript
from localpaged.store.transfer import (
    branch_off,
    conversation_ids,
    duplicate,
    messages_of,
    read_transcript,
    write_transcript,
)


@pytest.fixture
def chats(tmp_path: Path) -> Iterator[Conversations]:
    with closing(Store(tmp_path / "chats.db")) as store:
        yield store.conversations


def file_of(given: list[Transcript]) -> bytes:
    export = JsonExport()
    return b"".join([export.begin(), *map(export.add, given), export.end()])


def exported(chats: Conversations) -> bytes:
    return file_of([read_transcript(chats, one) for one in conversation_ids(chats)])


def imported(chats: Conversations, data: bytes) -> list[int]:
    return [write_transcript(chats, one) for one in parse_file(data).transcripts]


def a_conversation(chats: Conversations) -> int:
    """A question with two answers, the first chosen and followed by another question."""
    conversation = chats.create("Boats", "Be brief.", {"n": 2})
    user = chats.add_user_message(conversation.id, None, "Name a boat.")
    user.token_ids, user.num_kept_tokens = [1, 2, 3], 0
    answers = chats.add_candidates(user.id, 2, "tiny", {"seed": 2**63})
    for message in answers:
        message.text, message.token_ids, message.state = f"answer {message.candidate}", [70_000], "complete"
    chats.save_messages([user, *answers])
    chats.add_user_message(conversation.id, answers[0].id, "More")
    return conversation.id


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(given=st.lists(transcripts(), max_size=3))
def test_what_is_exported_and_imported_is_exported_as_the_same_bytes(
    chats: Conversations, given: list[Transcript]
) -> None:
    data = file_of(given)
    ids = imported(chats, data)
    assert file_of([read_transcript(chats, one) for one in ids]) == data
    for one in ids:
        chats.delete(one)
    assert exported(chats) == file_of([])
    # Into a store that has had other messages: other ids, the same bytes.
    imported(chats, data)
    assert exported(chats) == data
    for one in conversation_ids(chats):
        chats.delete(one)
    chats.purge_deleted(-1)


def test_an_export_holds_everything_that_a_conversation_has(chats: Conversations, tmp_path: Path) -> None:
    first = a_conversation(chats)
    chats.update(first, pinned=True, kv_pinned=True, archived=True, settings={"half": "🐙\\ud800", "big": 10**40})
    with closing(Store(tmp_path / "other.db")) as other:
        (copy,) = imported(other.conversations, exported(chats))
        assert other.conversations.get(copy) == chats.get(first)
        assert messages_of(other.conversations, copy) == messages_of(chats, first)


def test_an_answer_that_is_being_written_is_exported_as_interrupted(chats: Conversations) -> None:
    conversation = chats.create()
    user = chats.add_user_message(conversation.id, None, "Hi")
    chats.add_candidates(user.id, 1, "tiny", {})
    assert [one.state for one in read_transcript(chats, conversation.id).messages] == ["complete", "interrupted"]


def test_imported_messages_are_found(chats: Conversations, tmp_path: Path) -> None:
    a_conversation(chats)
    with closing(Store(tmp_path / "other.db")) as other:
        imported(other.conversations, exported(chats))
        assert [hit.snippet for hit in search_conversations(other.conversations, "name")] == ["\x02Name\x03 a boat."]


def test_a_duplicate_has_everything_and_the_first_one_stays(chats: Conversations) -> None:
    first = a_conversation(chats)
    before = exported(chats)
    copy = duplicate(chats, first)
    assert copy.title == "Boats (copy)" and copy.updated > chats.get(first).updated
    one, other = read_transcript(chats, first), read_transcript(chats, copy.id)
    assert other.messages == one.messages and other.chosen_root == one.chosen_root
    chats.delete(copy.id)
    assert exported(chats) == before


def test_a_branch_of_its_own_has_the_path_with_its_token_ids_and_nothing_beside_it(chats: Conversations) -> None:
    first = a_conversation(chats)
    hidden = chats.branch(first).turns[1].sibling_ids[1]
    copy = branch_off(chats, hidden, title="Other")
    turns = chats.branch(copy.id).turns
    assert [(turn.message.text, turn.message.token_ids) for turn in turns] == [
        ("Name a boat.", [1, 2, 3]),
        ("answer 1", [70_000]),
    ]
    assert (copy.title, copy.system_prompt) == ("Other", "Be brief.")
    assert len(messages_of(chats, copy.id)) == 2


def test_a_conversation_that_fails_in_the_middle_is_not_there_at_all(chats: Conversations) -> None:
    transcript = read_transcript(chats, a_conversation(chats))
    connection = chats.database._db.conn
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count={pages + 4}")
    transcript.messages[-1].text = "x" * 100_000
    with pytest.raises(StoreError, match="full"):
        write_transcript(chats, transcript)
    assert len(conversation_ids(chats)) == 1
    assert len(chats.database.rows("SELECT id FROM messages")) == 4


def changed(data: bytes, *path: str | int, to: Any) -> bytes:
    """The file with one value replaced."""
    value = whole = json.loads(data)
    for step in path[:-1]:
        value = value[step]
    value[path[-1]] = to
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("version",), 2, "has version 2 .*Update"),
        (("extra",), 1, "unknown field `extra`"),
        (("conversations", 0, "title"), 7, r"Expected `str`.*conversations\[0\].title"),
        (("conversations", 0, "settings"), [], r"conversations\[0\].settings is no JSON object"),
        (("conversations", 0, "created"), -1, r"`float` >= 0.*created"),
        (("conversations", 0, "updated"), 1e300, r"updated"),
        (("conversations", 0, "chosen_root"), 2, r"chosen_root: message 2 is no first message"),
        (("conversations", 0, "messages", 1, "id"), 1, r"messages\[1\].id: 1 is the id of an earlier"),
        (("conversations", 0, "messages", 1, "parent"), 9, r"messages\[1\].parent: 9 is no message before"),
        (("conversations", 0, "messages", 1, "parent"), 4, r"messages\[1\].parent: 4 is no message before"),
        (("conversations", 0, "messages", 0, "parent"), 1, r"messages\[0\].parent"),
        (("conversations", 0, "messages", 0, "chosen_child"), 4, r"message 4 is not under message 1"),
        (("conversations", 0, "messages", 0, "chosen_child"), 99, r"message 99 is not under"),
        (("conversations", 0, "messages", 0, "role"), "tool", r"'tool'.*messages\[0\].role"),
        (("conversations", 0, "messages", 0, "state"), "running", r"'running'"),
        (("conversations", 0, "messages", 0, "token_ids"), "AAAA", r"four bytes"),
        (("conversations", 0, "messages", 0, "candidate"), 2**70, r"candidate"),
        (("conversations", 0, "messages", 0, "liked"), True, r"unknown field `liked`"),
        (("conversations", 0, "messages", 1, "sampling"), 3, r"messages\[1\].sampling is no JSON object"),
        (("conversations", 0, "messages", 1, "timings"), {"warp": 9}, r"unknown field `warp`"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(
    chats: Conversations, path: tuple[str | int, ...], value: Any, says: str
) -> None:
    a_conversation(chats)
    with pytest.raises(InvalidRequestError, match=says):
        parse_file(changed(exported(chats), *path, to=value))


@pytest.mark.parametrize("cut", [1, 50, 200, -2])
def test_a_truncated_file_is_refused(chats: Conversations, cut: int) -> None:
    a_conversation(chats)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        parse_file(exported(chats)[:cut])
