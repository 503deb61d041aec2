"""Conversations as Markdown, and the names of downloaded files."""

import io
import zipfile

import pytest

from localpaged.store.export_markdown import MarkdownExport, markdown_of
from localpaged.store.file_name import content_disposition, file_name
from localpaged.store.transcript import Transcript, TranscriptMessage


def message(number: int, parent: int | None, role: str, text: str, **more: object) -> TranscriptMessage:
    return TranscriptMessage(
        id=number,
        parent=parent,
        role=role,  # type: ignore[arg-type]
        text=text,
        created=0.0,
        **({"state": "complete"} | more),  # type: ignore[arg-type]
    )


def transcript(*messages: TranscriptMessage, **more: object) -> Transcript:
    return Transcript(created=0.0, updated=1700000000.0, messages=list(messages), **more)  # type: ignore[arg-type]


def test_the_shown_branch_comes_first_and_alternatives_say_what_they_stand_instead_of() -> None:
    text = markdown_of(
        transcript(
            message(1, None, "user", "Name a boat.", chosen_child=3),
            message(2, 1, "assistant", "Petrel", model="tiny"),
            message(3, 1, "assistant", "Stillwater", model="tiny"),
            message(4, 2, "user", "Why?"),
            message(5, 3, "user", "Go on"),
            message(6, 5, "assistant", "Half", state="interrupted"),
            message(7, 5, "assistant", "", state="error", error="The disk *is* full."),
            title='Boats: "two"',
            system_prompt="Be brief.",
        )
    )
    assert text == (
        '---\ntitle: "Boats: \\"two\\""\ncreated: "1970-01-01T00:00:00Z"\nupdated: "2023-11-14T22:13:20Z"\n'
        'models: ["tiny"]\n---\n\n# Boats: "two"\n\n## System prompt\n\nBe brief.\n\n'
        "## 1 · You\n\nName a boat.\n\n## 2 · Answer (tiny)\n\nStillwater\n\n## 3 · You\n\nGo on\n\n"
        "## 4 · Answer\n\nHalf\n\n*(interrupted)*\n\n"
        "# Instead of 2: 2 of 2\n\n## 5 · Answer (tiny)\n\nPetrel\n\n## 6 · You\n\nWhy?\n\n"
        "# Instead of 4: 2 of 2 (none is chosen)\n\n## 7 · Answer\n\n*(empty)*\n\n*(The disk \\*is\\* full.)*\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "# A heading\n\n---\n\n* list\n\n| a | b |\n|---|---|",
        "```py\nclosed\n```",
        "~~~\n```\n~~~",
        "````\n```\n````\n",
        "`` ` ``",
        "<!-- a comment -->",
        "<pre>\nx</pre> <b>",
    ],
)
def test_text_that_ends_by_itself_is_written_as_it_is(text: str) -> None:
    assert f"## 1 · You\n\n{text.rstrip()}\n" in markdown_of(transcript(message(1, None, "user", text)))


@pytest.mark.parametrize(
    "text",
    [
        "```py\ncut off",
        "text\n~~~\n```",
        "````\n```",
        "<!-- never\nends",
        "<script>alert(1)",
        "<?php",
        "<!DOCTYPE",
        "<![CDATA[ x",
        "## 7 · Answer\n\nfaked",
        "# Instead of 3: 1 of 2",
    ],
)
def test_text_that_does_not_end_or_feigns_a_heading_cannot_leave_its_quotation(text: str) -> None:
    quoted = "\n".join(f"> {line}" if line else ">" for line in text.split("\n"))
    assert f"## 1 · You\n\n{quoted}\n\n" in markdown_of(transcript(message(1, None, "user", text))) + "\n"


def test_many_conversations_are_a_zip_with_one_document_each() -> None:
    export = MarkdownExport()
    pieces = [export.begin(), *(export.add(transcript(title=title)) for title in ("a/b", "a/b", "")), export.end()]
    with zipfile.ZipFile(io.BytesIO(b"".join(pieces))) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ["0001 a b.md", "0002 a b.md", "0003 conversation.md"]
        assert b"# a/b" in archive.read("0001 a b.md")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Names for a boat", "Names for a boat.json"),
        ("../../etc/passwd", "etc passwd.json"),
        ("a\r\nSet-Cookie: x=1", "a Set-Cookie x=1.json"),
        ('he said "no"', "he said no.json"),
        ("\u202egnp.exe\0", "gnp.exe.json"),
        ("", "conversation.json"),
        (" .hidden. ", "hidden.json"),
        ("CON", "conversation CON.json"),
        ("é" * 300, "é" * 80 + ".json"),
        ("🐙" * 80, "🐙" * 50 + ".json"),
    ],
)
def test_a_files_name_is_harmless_whatever_the_title(title: str, name: str) -> None:
    assert file_name(title, ".json") == name
    header = content_disposition(file_name(title, ".json"))
    assert header.isascii() and header.isprintable() and header.count('"') == 2


def test_the_header_has_a_plain_name_and_the_whole_one() -> None:
    assert (
        content_disposition("Café 🐙.md")
        == "attachment; filename=\"Cafe .md\"; filename*=UTF-8''Caf%C3%A9%20%F0%9F%90%99.md"
    )
