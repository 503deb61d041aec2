"""`localpaged export` and `localpaged import`: the database itself, while no server has it open."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from localpaged.errors import SettingError, StoreError
from localpaged.home import home
from localpaged.store.database import StoreInUseError
from localpaged.store.export_json import JsonExport
from localpaged.store.export_markdown import MarkdownExport, markdown_of
from localpaged.store.import_file import parse_file
from localpaged.store.store import Store
from localpaged.store.transfer import conversation_ids, read_transcript, write_transcript


def run_export(file: Path | None, format: str, conversation: int | None, force: bool, json_output: bool) -> None:
    """Write conversations to a file, or to stdout; the file is whole or not there."""
    if format not in ("json", "markdown"):
        raise SettingError(f"--format is {format!r}; it must be json or markdown.")
    if file is None and json_output:
        raise SettingError("--json tells what was written to a file. Give the FILE.")
    if file is not None and file.exists() and not force:
        raise SettingError(f"{file} is there already. Choose another name, or overwrite it with --force.")
    if not (home() / "chats.db").exists():
        raise StoreError(f"There is no database at {home() / 'chats.db'}. Set LOCALPAGED_HOME to the folder it is in.")
    with closing(_open_store("Ask the server for the file, GET /api/export, or stop it.")) as store:
        chats = store.conversations
        ids = conversation_ids(chats) if conversation is None else [chats.get(conversation).id]

        def pieces() -> Iterator[bytes]:
            if conversation is not None and format == "markdown":
                yield markdown_of(read_transcript(chats, conversation)).encode()
                return
            export = MarkdownExport() if format == "markdown" else JsonExport()
            yield export.begin()
            for one in ids:
                yield export.add(read_transcript(chats, one))
            yield export.end()

        num_bytes = _write(pieces(), file)
    if json_output:
        print(json.dumps({"file": str(file), "conversations": len(ids), "bytes": num_bytes}))
    elif file is not None:
        print(f"Exported {_count(len(ids))} to {file} ({num_bytes:,} bytes).")


def run_import(file: Path, json_output: bool) -> None:
    """Read a file of conversations and add them; say what was left out."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise SettingError(f"{file} cannot be read: {error.strerror}.") from error
    parsed = parse_file(data)
    with closing(_open_store("Send the file to the server, POST /api/import, or stop it.")) as store:
        imported = [write_transcript(store.conversations, transcript) for transcript in parsed.transcripts]
    losses = parsed.losses.all()
    if json_output:
        skipped = [msgspec.to_builtins(loss) for loss in losses]
        print(json.dumps({"source": parsed.source, "imported": imported, "skipped": skipped}))
        return
    print(f"Imported {_count(len(imported))}{f' from {parsed.source}' if parsed.source else ''}.")
    for loss in losses:
        times = f" ({loss.count} times)" if loss.count > 1 else ""
        print(f"Left out: {loss.what}{times}: {loss.why}")


def _open_store(remedy: str) -> Store:
    try:
        return Store(home() / "chats.db")
    except StoreInUseError as error:
        raise StoreError(f"A localpaged server is using {home() / 'chats.db'}. {remedy}") from error


def _write(pieces: Iterator[bytes], file: Path | None) -> int:
    """The number of bytes written. A file gets its name when it is whole."""
    if file is None:
        try:
            return sum(sys.stdout.buffer.write(piece) for piece in pieces)
        except BrokenPipeError:
            # Whoever reads has enough; nothing more can be said to them at the end either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as sink:
            num_bytes = sum(sink.write(piece) for piece in pieces)
        part.replace(file)
    except OSError as error:
        raise SettingError(f"{file} cannot be written: {error.strerror}.") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return num_bytes


def _count(number: int) -> str:
    return f"{number} conversation{'' if number == 1 else 's'}"
