"""Imports of other programs' exports: every branch is kept, and what is left out is counted."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from localpaged.errors import InvalidRequestError
from localpaged.store import import_file
from localpaged.store.foreign_tree import moment
from localpaged.store.import_file import parse_file
from localpaged.store.transcript import Transcript

DATA = Path(__file__).parent / "data"
CHATGPT = (DATA / "chatgpt_conversations.json").read_bytes()
OPENWEBUI = (DATA / "openwebui_chats.json").read_bytes()
U, A = "user", "assistant"


def tree(transcript: Transcript) -> list[tuple[int | None, str, str]]:
    """(parent, role, text) of each message, the ones that are shown with a star."""
    transcript.check("$")
    chosen = {message.chosen_child for message in transcript.messages} | {transcript.chosen_root}
    return [
        (message.parent, message.role, message.text + "*" * (message.id in chosen)) for message in transcript.messages
    ]


def losses(data: bytes) -> dict[str, int]:
    return {loss.what: loss.count for loss in parse_file(data).losses.all()}


def test_chatgpts_branches_are_kept_with_the_shown_one_and_turns_around_tools_become_one_answer() -> None:
    boats, voice = parse_file(CHATGPT).transcripts
    assert tree(boats) == [
        (None, U, "Name a boat.*"),
        (1, A, "Stillwater*"),
        (2, U, "Draw it, and count its sails.*"),
        (3, A, "It has 3 sails .\n\n[image]\n\nThere it is.*"),
        (1, A, "Petrel"),
        (None, U, "Name a blue boat."),
        (6, A, "Azure*"),
    ]
    assert (boats.title, boats.system_prompt, boats.pinned) == ("Boats", "I sail.\n\nBe brief.", True)
    assert (boats.created, boats.updated) == (1700000000.25, 1700000101.75)
    answers = [message for message in boats.messages if message.role == A]
    assert [(one.model, one.finish_reason) for one in answers] == [
        ("gpt-4", "stop"),
        ("gpt-4o", "stop"),
        ("gpt-4", "length"),
        ("gpt-4", "stop"),
    ]
    assert tree(voice) == [
        (None, U, "[audio]\nHello there\n[file: log.txt]*"),
        (1, A, "Hi! *"),
        (2, U, "What is this?\n[image]*"),
    ]
    assert voice.messages[1].state == "interrupted"
    # A time that makes no sense is the conversation's.
    assert (voice.updated, voice.messages[2].created) == (1700000200, 1700000200)


def test_what_chatgpts_export_has_besides_is_counted() -> None:
    assert losses(CHATGPT) == {
        "reasoning": 1,
        "tool call": 1,
        "code interpreter output": 1,
        "citation": 1,
        "image": 2,
        "audio": 1,
        "attached file": 1,
    }


def test_open_webuis_side_by_side_answers_are_candidates_and_old_chats_a_line() -> None:
    boats, old = parse_file(OPENWEBUI).transcripts
    assert tree(boats) == [
        (None, U, "Name a boat.\n[image]\n[file: hull.pdf]*"),
        (1, A, "Petrel*"),
        (2, U, "Another.*"),
        (3, A, "*"),
        (3, A, "Half an ans"),
        (1, A, "Stillwater"),
    ]
    assert [message.candidate for message in boats.messages] == [None, 0, None, 0, 1, 1]
    assert [message.state for message in boats.messages[3:]] == ["error", "interrupted", "complete"]
    assert boats.messages[3].error == "The model is not there."
    assert (boats.system_prompt, boats.pinned, boats.messages[5].model) == ("Be brief.", True, "qwen3")
    assert tree(old) == [(None, U, "Hi*"), (1, A, "Oh my\n[image]*")]
    assert (old.system_prompt, old.created) == ("Answer in rhyme.", 1690000000)
    assert losses(OPENWEBUI) == {"image": 2, "attached file": 1, "reasoning": 1, "citation": 2}


def node(parent: str | None, role: str | None = None, text: Any = "", **more: Any) -> dict[str, Any]:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}} | more
    return {"parent": parent, "children": [], "message": message if role else None}


def chatgpt(mapping: dict[str, Any], **more: Any) -> bytes:
    return json.dumps([{"title": "T", "mapping": mapping} | more]).encode()


def only(mapping: dict[str, Any], **more: Any) -> Transcript:
    (transcript,) = parse_file(chatgpt(mapping, **more)).transcripts
    return transcript


def test_a_branch_in_the_middle_of_a_turn_is_written_into_both_answers() -> None:
    mapping = {"u": node(None, U, "q"), "a": node("u", A, "one"), "b": node("a", A, "two"), "c": node("a", A, "three")}
    assert tree(only(mapping, current_node="c")) == [
        (None, U, "q*"),
        (1, A, "one\n\ntwo"),
        (1, A, "one\n\nthree*"),
    ]
    # One that was answered as it was is kept beside what goes on from it.
    mapping["v"] = node("a", U, "why")
    assert tree(only(mapping, current_node="v")) == [
        (None, U, "q*"),
        (1, A, "one*"),
        (1, A, "one\n\ntwo"),
        (1, A, "one\n\nthree"),
        (2, U, "why*"),
    ]


def test_children_are_in_the_order_that_their_parent_gives() -> None:
    mapping = {"u": node(None, U, "q"), "a": node("u", A, "late"), "b": node("u", A, "early")}
    mapping["u"]["children"] = ["b", "a", "nobody"]
    assert [text for _, _, text in tree(only(mapping))] == ["q*", "early", "late*"]


def test_an_answer_at_the_beginning_and_a_missing_parent_are_kept_and_reported() -> None:
    mapping = {"a": node("gone", A, "Welcome"), "u": node("a", U, "Hi")}
    assert tree(only(mapping)) == [(None, U, "*"), (1, A, "Welcome*"), (2, U, "Hi*")]
    assert losses(chatgpt(mapping)) == {"message whose parent is missing": 1, "answer at the beginning": 1}


def test_a_conversation_that_is_no_tree_is_left_out_whole_and_the_others_are_taken() -> None:
    circle = {"u": node(None, U, "q"), "a": node("b", A), "b": node("a", U)}
    good = json.loads(chatgpt({"u": node(None, U, "q")}))
    bad = json.loads(chatgpt(circle))
    wrong = [{"title": "W", "mapping": {"u": {"message": {"author": "me"}}}}]
    parsed = parse_file(json.dumps(good + bad + wrong).encode())
    assert len(parsed.transcripts) == 1
    circle_loss, shape_loss = parsed.losses.all()
    assert (circle_loss.what, circle_loss.why) == (
        "conversation 2 'T'",
        "2 of its messages are in a circle, each under another.",
    )
    assert shape_loss.what == "conversation 3" and "message.author" in shape_loss.why
    with pytest.raises(InvalidRequestError, match=r"conversation 1 'T'.*circle"):
        parse_file(chatgpt(circle))


@pytest.mark.parametrize("roles", [(U, A), (A, A), (U, U)])
def test_a_conversation_of_any_depth_is_read_whole(roles: tuple[str, str]) -> None:
    mapping = {str(i): node(str(i - 1) if i else None, roles[i % 2], "x" * 50) for i in range(20_000)}
    assert sum(message.text.count("x" * 50) for message in only(mapping).messages) == 20_000


def test_branches_that_would_fill_the_memory_are_refused() -> None:
    mapping = {"u": node(None, U, "q")}
    for i in range(400):
        mapping[f"a{i}"] = node(f"a{i - 1}" if i else "u", A, "x" * 1000)
        mapping[f"u{i}"] = node(f"a{i}", U, "q")
    with pytest.raises(InvalidRequestError, match="share too much text"):
        parse_file(chatgpt(mapping))


def test_folded_parts_without_end_cost_no_time() -> None:
    text = '<details type="reasoning">' * 100_000 + "\ue200" * 100_000
    chat = {"chat": {"history": {"messages": {"u": {"role": U, "content": text}}, "currentId": "u"}}}
    (transcript,) = parse_file(json.dumps([chat]).encode()).transcripts
    assert transcript.messages[0].text == text
    assert only({"u": node(None, U, text)}).messages[0].text == text


def test_half_characters_and_nul_are_handled() -> None:
    data = chatgpt({"u": node(None, U, "a\0b \ud83d \udc19🐙 \\ud800"), "a": node("u", A, "\ud800")})
    parsed = parse_file(data)
    assert [message.text for message in parsed.transcripts[0].messages] == ["a\0b \ufffd \ufffd🐙 \\ud800", "\ufffd"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1700000000, 1700000000),
        (1700000000.5, 1700000000.5),
        (1700000000123, 1700000000.123),
        (1700000000123456, 1700000000.123456),
        (1700000000123456789, 1700000000.1234568),
        (-1, None),
        (0, None),
        (10**40, None),
        (10**400, None),
        (True, None),
        ("2023", None),
        (None, None),
    ],
)
def test_times_are_read_in_every_unit_and_nonsense_is_none(value: Any, seconds: float | None) -> None:
    assert moment(value) == seconds


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"hello", "no JSON and no zip"),
        (b"---\ntitle: x\n---\n", "Markdown.*Export as JSON"),
        (b"# Boats\n", "Markdown"),
        (b"SQLite format 3\0", "database"),
        (b"{}", "no export of localpaged"),
        (b'[{"messages": []}]', "no export of localpaged"),
        (b"[1]", "Expected `object`"),
        (b'{"mapping": ', "truncated"),
        (b'[{"mapping": {},}]', r"malformed.*byte 16"),
        (b'[{"mapping": {}, "title": "\xff"}]', "conversation 1: Invalid UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"mapping":{"a":{"message":{"author":{},"metadata":{"x":' + b"[" * 5000, "nested too deeply"),
        (b'[{"mapping": {}}]', "no message"),
        (b'{"format": "localpaged-conversations", "version": 1, "x": "\xff"}', "no UTF-8 at byte 59"),
        (b"PK\x03\x04 and then nothing", "zip archive cannot be read"),
    ],
)
def test_what_is_no_export_is_refused_with_the_reason(data: bytes, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        parse_file(data)


def test_a_byte_order_mark_and_an_empty_list_are_fine() -> None:
    assert len(parse_file(b"\xef\xbb\xbf" + OPENWEBUI).transcripts) == 2
    assert parse_file(b"[]").transcripts == []


def zipped(*members: tuple[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return sink.getvalue()


def test_a_zip_is_read_with_all_its_parts_and_other_files_are_counted() -> None:
    one, other = (json.dumps([value]).encode() for value in json.loads(CHATGPT))
    data = zipped(
        ("export/conversations-001.json", other), ("export/conversations-000.json", one), ("user.json", b"{}")
    )
    parsed = parse_file(data)
    assert [transcript.title for transcript in parsed.transcripts] == ["Boats", ""]
    assert losses(data)["other file in the archive"] == 1
    assert parse_file(zipped(("chat-export-17.json", OPENWEBUI))).source == "Open WebUI"


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([], "no conversations.json"),
        ([("a.json", b"{}"), ("b.json", b"{}")], "no conversations.json"),
        ([("../conversations.json", b"[]")], "no conversations.json"),
        ([("conversations.json", b" " * (100 << 20))], "unpacks to more than"),
        ([("conversations.json", b"[1")], "conversations.json: The file cannot be read"),
    ],
)
def test_a_zip_that_is_wrong_is_refused(members: list[tuple[str, bytes]], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        parse_file(zipped(*members))


def test_many_parts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_file, "MAX_UNPACKED_BYTES", 3 * len(CHATGPT))
    parts = [(f"conversations-{i:03}.json", CHATGPT) for i in range(4)]
    assert len(parse_file(zipped(*parts[:2])).transcripts) == 4
    with pytest.raises(InvalidRequestError, match=r"conversations-003.json unpacks to more"):
        parse_file(zipped(*parts))


def test_a_damaged_zip_never_fails_otherwise_than_by_being_refused() -> None:
    good = zipped(("conversations.json", CHATGPT))
    for place in range(0, len(good), 7):
        damaged = bytearray(good)
        damaged[place] ^= 0xFF
        try:
            parse_file(bytes(damaged))
        except InvalidRequestError as error:
            assert str(error)
