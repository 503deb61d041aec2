"""Conversations as Markdown for people to read; it is not imported again.

The branch that is shown comes first, then every alternative with the number of the message it stands instead of. A
message's text is written as it is; what would not end by itself (a code block that was cut off, a comment) or could be
taken for one of these headings stands in a quotation, from which nothing gets out.
Source: https://spec.commonmark.org/0.31.2/ (4.5 fenced code blocks, 4.6 HTML blocks, 5.1 block quotes).
"""

import json
import re
import zipfile
from collections import deque
from datetime import UTC, datetime
from io import RawIOBase

from localpaged.store.file_name import file_name
from localpaged.store.transcript import Transcript, TranscriptMessage

NAMES = {"user": "You", "assistant": "Answer"}
# How an HTML block begins, and what it goes on to when that does not come.
HTML_BLOCKS = (
    (r"<!--", "-->"),
    (r"<\?", r"\?>"),
    (r"<!\[CDATA\[", r"\]\]>"),
    (r"<![A-Za-z]", ">"),
    (r"<(?:script|pre|style|textarea)(?:[\s>]|$)", "</(?:script|pre|style|textarea)>"),
)
LINE_END = re.compile(r"\r\n|\r|\n")
HEADING = re.compile(r" {0,3}#{1,2} (?:\d+ · |Instead of )")


def markdown_of(transcript: Transcript) -> str:
    """One conversation as a Markdown document."""
    title = "".join(char for char in " ".join(transcript.title.split()) if char.isprintable())
    models = sorted({message.model for message in transcript.messages if message.model})
    front = {"title": title, "created": _time(transcript.created), "updated": _time(transcript.updated)}
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items())]
    if models:
        lines.append(f"models: {json.dumps(models, ensure_ascii=False)}")
    lines += ["---", "", f"# {_escaped(title) or 'Conversation'}", ""]
    if transcript.system_prompt.strip():
        lines += ["## System prompt", "", _contained(transcript.system_prompt), ""]
    for section in _sections(transcript):
        lines += section
    return "\n".join(lines)


class MarkdownExport:
    """Many conversations: a zip archive with a document for each, in pieces."""

    suffix = ".zip"
    media_type = "application/zip"

    def __init__(self) -> None:
        self._sink = _Sink()
        self._zip = zipfile.ZipFile(self._sink, "w", zipfile.ZIP_DEFLATED)
        self._num_added = 0

    def begin(self) -> bytes:
        return b""

    def add(self, transcript: Transcript) -> bytes:
        self._num_added += 1
        name = f"{self._num_added:04d} {file_name(transcript.title, '.md')}"
        self._zip.writestr(name, markdown_of(transcript).encode())
        return self._sink.take()

    def end(self) -> bytes:
        self._zip.close()
        return self._sink.take()


class _Sink(RawIOBase):
    """A file that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, piece: object) -> int:
        data = bytes(piece)  # type: ignore[call-overload]
        self._pieces.append(data)
        return len(data)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


def _sections(transcript: Transcript) -> list[list[str]]:
    """The shown branch, then the alternatives to its messages, then those to theirs; each a list of lines."""
    children: dict[int | None, list[TranscriptMessage]] = {}
    for message in transcript.messages:
        children.setdefault(message.parent, []).append(message)
    chosen = {message.id: message.chosen_child for message in transcript.messages}
    sections: list[list[str]] = []
    number = 0
    # Where a section begins, and the number and count of what it is an alternative to.
    pending: deque[tuple[TranscriptMessage, str]] = deque()

    def walk(message: TranscriptMessage | None, lines: list[str]) -> None:
        nonlocal number
        while message is not None:
            number += 1
            lines += [f"## {number} · {_name(message)}", "", _contained(message.text) or "*(empty)*", ""]
            if message.state != "complete":
                lines += [f"*({_escaped(message.error) if message.error else message.state})*", ""]
            message = open_fork(message.id, chosen[message.id])

    def open_fork(parent: int | None, choice: int | None) -> TranscriptMessage | None:
        """The message to go on with; its siblings are kept for later."""
        siblings = children.get(parent, [])
        if not siblings:
            return None
        first = next((one for one in siblings if one.id == choice), None)
        note = ""
        if first is None and len(siblings) > 1 and siblings[-1].role == "assistant":
            first, note = siblings[0], " (none is chosen)"
        first = first or siblings[-1]
        others = [one for one in siblings if one is not first]
        for place, other in enumerate(others, 2):
            pending.append((other, f"# Instead of {number + 1}: {place} of {len(siblings)}{note}"))
        return first

    main: list[str] = []
    walk(open_fork(None, transcript.chosen_root), main)
    sections.append(main)
    while pending:
        message, heading = pending.popleft()
        section = [heading, ""]
        walk(message, section)
        sections.append(section)
    return sections


def _name(message: TranscriptMessage) -> str:
    name = NAMES[message.role]
    return f"{name} ({_escaped(message.model)})" if message.model else name


def _contained(text: str) -> str:
    """The text as it is where it ends by itself, else as a quotation."""
    if not _stays_open(text):
        return text.rstrip("\n")
    return "\n".join(f"> {line}" if line else ">" for line in LINE_END.split(text.rstrip("\n")))


def _stays_open(text: str) -> bool:
    """Whether a Markdown reader takes what follows the text for a part of it, or a line of it for our heading."""
    fence = ""
    until = ""
    for line in LINE_END.split(text):
        if until:
            until = "" if re.search(until, line, re.IGNORECASE) else until
        elif fence:
            if re.fullmatch(rf" {{0,3}}{re.escape(fence[0])}{{{len(fence)},}}\s*", line):
                fence = ""
        elif opened := re.match(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})", line):
            fence = opened[1]
        elif HEADING.match(line):
            return True
        else:
            for begin, end in HTML_BLOCKS:
                if (found := re.match(rf" {{0,3}}{begin}", line, re.IGNORECASE)) and not re.search(
                    end, line[found.end() - 1 :] if end == ">" else line[found.end() :], re.IGNORECASE
                ):
                    until = end
                    break
    return bool(fence or until)


def _escaped(text: str) -> str:
    """One line in which nothing is markup."""
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", " ".join(text.split()))


def _time(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
