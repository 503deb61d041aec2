"""Export and import over HTTP: downloads with harmless names, one conversation at a time in memory."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from localpaged.errors import InvalidRequestError, StoreError
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.mine import Mine
from localpaged.server.native_schema import Imported, answers
from localpaged.store.export_json import JsonExport
from localpaged.store.export_markdown import MarkdownExport, markdown_of
from localpaged.store.file_name import content_disposition, file_name
from localpaged.store.import_file import parse_file
from localpaged.store.message import NotFoundError
from localpaged.store.store import Store
from localpaged.store.transfer import conversation_ids, read_transcript, write_transcript

Format = Literal["json", "markdown"]
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
FILE_TYPES = ("application/json", "application/zip", "application/octet-stream")
DOWNLOAD = "A file to keep: JSON for importing it again, or Markdown for reading it."


def router(engine: EngineHandle, store: Store) -> APIRouter:
    """The routes of export and import."""
    routes = APIRouter(prefix="/api", tags=["export and import"])

    def download(summary: str, *errors: int, markdown: str) -> dict[str, Any]:
        described = answers(summary, None, DOWNLOAD, 400, *errors)
        described["responses"][200] = {"content": {"application/json": BINARY, markdown: BINARY}}
        return described | {"response_class": Response}

    @routes.get(
        "/conversations/{conversation_id}/export",
        **download("Download a conversation", 404, markdown="text/markdown"),
    )
    async def export_one(mine: Mine, conversation_id: int, format: Format = "json") -> Response:
        transcript = await store.do(read_transcript, mine, conversation_id)
        if format == "markdown":
            text = await asyncio.to_thread(markdown_of, transcript)
            return _download(text, "text/markdown; charset=utf-8", file_name(transcript.title, ".md"))
        export = JsonExport()
        data = b"".join([export.begin(), await asyncio.to_thread(export.add, transcript), export.end()])
        return _download(data, export.media_type, file_name(transcript.title, export.suffix))

    @routes.get("/export", **download("Download all conversations", markdown="application/zip"))
    async def export_all(mine: Mine, format: Format = "json") -> Response:
        """As JSON, or as a zip archive with a Markdown document for each. Written while it is read."""
        export = MarkdownExport() if format == "markdown" else JsonExport()
        ids = await store.do(conversation_ids, mine)

        async def pieces() -> AsyncIterator[bytes]:
            yield export.begin()
            for conversation_id in ids:
                try:
                    transcript = await store.do(read_transcript, mine, conversation_id)
                except NotFoundError:
                    continue  # It was deleted meanwhile.
                yield await asyncio.to_thread(export.add, transcript)
            yield export.end()

        return StreamingResponse(pieces(), headers=_headers(f"localpaged{export.suffix}"), media_type=export.media_type)

    @routes.post(
        "/import",
        **answers("Import conversations", Imported, "What was imported and what was left out.", 400, 413, 503),
        openapi_extra={"requestBody": {"required": True, "content": dict.fromkeys(FILE_TYPES, BINARY)}},
    )
    async def import_file(mine: Mine, request: Request) -> dict[str, Any]:
        """The body is the file: an export of this program, of ChatGPT (conversations.json or the zip), of Open WebUI.

        Nothing is stored unless the whole file can be read. What has no place here is counted in `skipped`.
        """
        if request.headers.get("content-type", "").startswith("multipart/"):
            raise InvalidRequestError("Send the file itself as the body (curl --data-binary @FILE), no form.", "body")
        parsed = await asyncio.to_thread(parse_file, await request.body())
        imported: list[int] = []
        for transcript in parsed.transcripts:
            try:
                imported.append(await store.do(write_transcript, mine, transcript))
            except StoreError as error:
                done = f"{len(imported)} of {len(parsed.transcripts)} conversations were imported: {imported}."
                raise StoreError(f"{error} {done}") from error
            if transcript.pinned or transcript.kv_pinned:
                engine.pin(str(imported[-1]), True)
        skipped = [msgspec.to_builtins(loss) for loss in parsed.losses.all()]
        return {"source": parsed.source, "imported": imported, "skipped": skipped}

    return routes


def _download(content: bytes | str, media_type: str, name: str) -> Response:
    return Response(content, headers=_headers(name), media_type=media_type)


def _headers(name: str) -> dict[str, str]:
    return {"Content-Disposition": content_disposition(name), "Cache-Control": "no-store"}
