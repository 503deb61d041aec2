"""A file of conversations, whoever wrote it: what it is, and what is in it.

Everything is read before anything is stored. A conversation that cannot be read is left out whole and reported; a file
in which there is nothing else is refused. Nothing is unpacked to disk, whatever names an archive has in it.
"""

import io
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, TypeVar

import msgspec

from localpaged.errors import InvalidRequestError
from localpaged.store.export_json import FORMAT, parse_json_export
from localpaged.store.import_chatgpt import ChatGptConversation
from localpaged.store.import_openwebui import OpenWebUiConversation
from localpaged.store.losses import Losses
from localpaged.store.transcript import ABSENT, Transcript, with_whole_characters
from localpaged.store.transfer import MAX_TITLE_CHARS

MAX_UNPACKED_BYTES = 512 << 20
# Conversations are packed to a tenth or so; what shrinks much more is made to fill the memory.
MAX_RATIO = 100
FREE_BYTES = 1 << 20
SHARD = re.compile(r"conversations(-\d{1,6})?\.json")
READERS: dict[str, type[ChatGptConversation] | type[OpenWebUiConversation]] = {
    "mapping": ChatGptConversation,
    "chat": OpenWebUiConversation,
}
NAMES = {"mapping": "ChatGPT", "chat": "Open WebUI"}
T = TypeVar("T")


class ImportedFile(msgspec.Struct, kw_only=True):
    """What a file holds: which program's it is, its conversations, and what is left out."""

    source: str
    transcripts: list[Transcript]
    losses: Losses


def parse_file(data: bytes) -> ImportedFile:
    """Read an export of localpaged, ChatGPT (its zip too) or Open WebUI. Raises InvalidRequestError, saying where."""
    if data.startswith(b"PK\x03\x04") or data.startswith(b"PK\x05\x06"):
        found = ImportedFile(source="", transcripts=[], losses=Losses())
        for name, member in _members(data, found.losses):
            part = _parse_json(member, f"{name}: ")
            found.source = part.source
            found.transcripts += part.transcripts
            found.losses.merge(part.losses)
        return found
    return _parse_json(data, "")


def _parse_json(data: bytes, where: str) -> ImportedFile:
    data = data.removeprefix(b"\xef\xbb\xbf")
    begin = data[:64].lstrip()[:1]
    if begin not in (b"{", b"["):
        raise InvalidRequestError(f"{where}{_no_json(data)}", "body")
    return _reported(lambda: _recognised(data, begin == b"["), data, where)


def _no_json(data: bytes) -> str:
    if not data.strip():
        return "The file is empty."
    if data.startswith(b"SQLite format 3"):
        return "This is a database. Stop the server and put it in place of chats.db, or export it as JSON."
    if data.startswith((b"---", b"#")):
        return "This is Markdown, which is for reading. Export as JSON to import it again."
    return "The file is no JSON and no zip. Give an export of localpaged, ChatGPT or Open WebUI."


class _Probe(msgspec.Struct):
    """Which of these fields there are says who wrote it."""

    format: Any = None
    mapping: msgspec.Raw = ABSENT
    chat: msgspec.Raw = ABSENT

    def key(self) -> str:
        if self.format == FORMAT:
            return "format"
        key = "mapping" if self.mapping is not ABSENT else "chat" if self.chat is not ABSENT else None
        if key is None:
            raise InvalidRequestError(
                "The file is JSON, but no export of localpaged, ChatGPT (conversations.json) or Open WebUI.", "body"
            )
        return key


def _recognised(data: bytes, is_list: bool) -> ImportedFile:
    elements = _decode(msgspec.Raw(data), list[msgspec.Raw]) if is_list else [msgspec.Raw(data)]
    losses = Losses()
    if not elements:
        return ImportedFile(source="", transcripts=[], losses=losses)
    key = _decode(elements[0], _Probe).key()
    if key == "format":
        return ImportedFile(source="localpaged", transcripts=parse_json_export(data), losses=losses)
    transcripts = []
    now = time.time()
    first_reason = ""
    for place, element in enumerate(elements):
        at = f"conversation {place + 1}"
        # Its own, so that a conversation that is left out does not count twice.
        own = Losses()
        try:
            conversation = _decode(element, READERS[key])
            at = f"conversation {place + 1} {(conversation.title or '')[:60]!r}"
            transcript = conversation.transcript(now, own)
            if not transcript.messages:
                raise InvalidRequestError("It has no message that can be taken over.")
        except (msgspec.MsgspecError, InvalidRequestError, RecursionError) as error:
            reason = "It is nested too deeply." if isinstance(error, RecursionError) else str(error)
            first_reason = first_reason or f"{at}: {reason}"
            losses.add(at, reason)
            continue
        if len(transcript.title) > MAX_TITLE_CHARS:
            transcript.title = transcript.title[: MAX_TITLE_CHARS - 1] + "…"
            own.add("long title", f"cut to {MAX_TITLE_CHARS} characters")
        losses.merge(own)
        transcripts.append(transcript)
    if not transcripts:
        raise InvalidRequestError(f"No conversation of the file can be read. {first_reason}", "body")
    return ImportedFile(source=NAMES[key], transcripts=transcripts, losses=losses)


def _decode(raw: msgspec.Raw, kind: type[T]) -> T:
    """A value of JSON text in which half a character may stand alone; it becomes U+FFFD."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = with_whole_characters(bytes(raw))
        if mended == bytes(raw):
            raise
        return msgspec.json.decode(mended, type=kind)


def _reported(read: Callable[[], ImportedFile], data: bytes, where: str) -> ImportedFile:
    try:
        return read()
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}{error}", "body") from error
    except RecursionError as error:
        raise InvalidRequestError(f"{where}The file is nested too deeply.", "body") from error
    except msgspec.MsgspecError as error:
        reason = str(error)
        try:
            data.decode()
        except UnicodeDecodeError as wrong:
            reason = f"it is no UTF-8 at byte {wrong.start}"
        raise InvalidRequestError(f"{where}The file cannot be read: {reason}.", "body") from error


def _members(data: bytes, losses: Losses) -> Iterator[tuple[str, bytes]]:
    """The files of conversations in a zip archive, one after the other. Raises InvalidRequestError."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {info.filename: info for info in archive.infolist() if not info.is_dir()}
            inside = [name for name in files if ".." not in PurePosixPath(name).parts]
            wanted = [name for name in inside if SHARD.fullmatch(PurePosixPath(name).name)]
            if not wanted:
                others = [name for name in inside if name.endswith(".json")]
                wanted = others if len(others) == 1 else []
            if not wanted:
                raise InvalidRequestError("There is no conversations.json in the zip archive.", "body")
            losses.add("other file in the archive", "only conversations are taken over", len(files) - len(wanted))
            room = MAX_UNPACKED_BYTES
            for name in sorted(wanted):
                info = files[name]
                if info.flag_bits & 1:
                    raise InvalidRequestError(f"{name} is encrypted. Unpack it and import that.", "body")
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise InvalidRequestError(f"{name} is packed in a rare way. Unpack it and import that.", "body")
                most = min(room, MAX_RATIO * info.compress_size + FREE_BYTES)
                with archive.open(info) as file:
                    member = file.read(most + 1)
                if len(member) > most:
                    raise InvalidRequestError(
                        f"{name} unpacks to more than {most:,} bytes, which no export does. It is not read.", "body"
                    )
                room -= len(member)
                yield name, member
    except InvalidRequestError:
        raise
    # All that zipfile raises for an archive that is damaged, cut off, or made to mislead.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OSError) as error:
        raise InvalidRequestError(
            f"The zip archive cannot be read: {error}. Export it again, or unpack it and import the file in it.", "body"
        ) from error
