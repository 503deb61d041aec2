"""The HTTP API of the chat page: conversations, messages, jobs and their event streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Request
from starlette.responses import Response, StreamingResponse

from localpaged import __version__
from localpaged.errors import LocalpagedError
from localpaged.server.access import Access
from localpaged.server.chat_schema import (
    Again,
    ConversationChange,
    Draft,
    MessageIds,
    NewConversation,
    NewMessage,
    Sampling,
    StopSome,
)
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.history import Tokenizer, branch_token_ids, build_prompt
from localpaged.server.job import Job
from localpaged.server.jobs import ConversationBusyError, JobManager, lease_id_of, title_of
from localpaged.server.kv_api import on_gpu, tier_of
from localpaged.server.mine import Mine
from localpaged.server.native_schema import (
    ConversationAnswer,
    ConversationList,
    ConversationView,
    Counted,
    Deleted,
    Started,
    StateAnswer,
    Stopped,
    answers,
    events_answer,
)
from localpaged.store.conversation_search import search_conversations
from localpaged.store.conversations import Conversations
from localpaged.store.message import Conversation, Message, NotFoundError
from localpaged.store.store import Store

WINDOW = 60  # messages of a branch in one answer
# The engine answers between steps; the list of conversations does not wait for a long one.
RESIDENCY_TIMEOUT_S = 0.1


def router(
    engine: EngineHandle,
    store: Store,
    jobs: JobManager,
    tokenizer_provider: Callable[[], Tokenizer] | None,
    is_default_model: bool = False,
    access: Access | None = None,
    data_folder: Path | None = None,
) -> APIRouter:
    """Everything under /api that the page uses, apart from /api/kv."""
    routes = APIRouter(prefix="/api", tags=["conversations"])

    async def view(mine: Conversations, conversation_id: int, before: int | None = None) -> dict[str, Any]:
        conversation = await store.do(mine.get, conversation_id)
        branch = await store.do(mine.branch, conversation_id, WINDOW, before)
        job = jobs.running_in(conversation_id)
        return {
            "conversation": conversation_json(conversation),
            "turns": [{"message": message_json(turn.message), "siblings": turn.sibling_ids} for turn in branch.turns],
            "open_candidates": [message_json(message) for message in branch.open_candidates],
            "num_earlier": branch.num_earlier,
            "job": job_json(job) if job else None,
        }

    async def job_of(mine: Conversations, job_id: str) -> Job | None:
        """A job, unless it is somebody else's."""
        job = jobs.get(job_id)
        if job is not None:
            try:
                await store.do(mine.get, job.conversation_id)
            except NotFoundError:
                return None
        return job

    tiers: dict[str, str] = {}

    async def kv_tiers() -> dict[str, str]:
        """Where each conversation's KV is; as it was last known while the engine is in a long step."""
        with contextlib.suppress(TimeoutError, LocalpagedError):
            found = await asyncio.wait_for(engine.residency(), RESIDENCY_TIMEOUT_S)
            tiers.clear()
            tiers.update((one.conversation, tier_of(one, on_gpu(engine))) for one in found)
        return tiers

    def started(job: Job) -> dict[str, Any]:
        return {"job": job.id, "user": job.user.id, "conversation": job.conversation_id}

    @routes.get("/state", **answers("What runs here", StateAnswer, "Version, model and defaults."))
    async def state(mine: Mine) -> dict[str, Any]:
        return {
            "version": __version__,
            "engine": engine.state,
            "error": engine.start_error,
            "model": msgspec.to_builtins(engine.info) if engine.info else None,
            "is_default_model": is_default_model,
            "features": msgspec.to_builtins(engine.features),
            "num_conversations": await store.do(mine.count),
            "defaults": Sampling(n=4).model_dump(),
            "user": mine.owner or "",
            "needs_login": access is not None and access.needs_key,
            "data_folder": str(data_folder) if data_folder and not mine.owner else None,
        }

    @routes.get(
        "/conversations",
        **answers("List or search conversations", ConversationList, "Pinned first, then latest, archived last."),
    )
    async def list_conversations(mine: Mine, query: str = "") -> dict[str, Any]:
        hits = await store.do(search_conversations, mine, query)
        running = set(jobs.running_conversations())
        kv = await kv_tiers()
        untold = "none" if engine.features.kv else None
        return {
            "conversations": [
                {
                    **conversation_json(hit.conversation),
                    "snippet": hit.snippet,
                    "marked_title": hit.marked_title,
                    "hits": msgspec.to_builtins(hit.hits),
                    "num_hits": hit.num_hits,
                    "running": hit.conversation.id in running,
                    "kv": kv.get(str(hit.conversation.id), untold),
                }
                for hit in hits
            ],
            "total": await store.do(mine.count),
        }

    @routes.post(
        "/conversations", **answers("Create a conversation", ConversationView, "It is empty.", 400, status=201)
    )
    async def create_conversation(mine: Mine, body: NewConversation) -> dict[str, Any]:
        conversation = await store.do(mine.create, body.title, body.system_prompt, body.settings)
        return await view(mine, conversation.id)

    @routes.get(
        "/conversations/{conversation_id}", **answers("Open a conversation", ConversationView, "What it shows.", 404)
    )
    async def get_conversation(mine: Mine, conversation_id: int, before: int | None = None) -> dict[str, Any]:
        """What a conversation shows. Its KV comes in from disk meanwhile, where that is where it is."""
        shown = await view(mine, conversation_id, before)
        if before is None and shown["turns"] and not shown["job"]:
            path = await store.do(mine.path_to, shown["turns"][-1]["message"]["id"])
            engine.warm(str(conversation_id), branch_token_ids(path))
        return shown

    @routes.patch(
        "/conversations/{conversation_id}",
        **answers(
            "Rename, pin, archive or set up a conversation", ConversationAnswer, "As it is with the change.", 400, 404
        ),
    )
    async def change_conversation(mine: Mine, conversation_id: int, body: ConversationChange) -> dict[str, Any]:
        """An empty title brings the automatic one back. An archived conversation is not pinned."""
        fields = {name: value for name, value in body.model_dump().items() if value is not None}
        if body.title is not None and not body.title.strip():
            fields["title"] = title_of(await store.do(mine.first_text, conversation_id))
        if body.archived:
            fields["pinned"] = False
        conversation = await store.do(mine.update, conversation_id, **fields)
        if "pinned" in fields:
            engine.pin(str(conversation_id), conversation.pinned or conversation.kv_pinned)
        return conversation_json(conversation)

    @routes.delete(
        "/conversations/{conversation_id}",
        **answers("Delete a conversation", Deleted, "It can be restored for ten minutes.", 404),
    )
    async def delete_conversation(mine: Mine, conversation_id: int) -> dict[str, Any]:
        await store.do(mine.delete, conversation_id)
        if job := jobs.running_in(conversation_id):
            await jobs.stop(job.id)
        engine.drop_leases(conversation=str(conversation_id))
        await store.do(mine.purge_deleted, 600)
        return {"deleted": conversation_id}

    @routes.post(
        "/conversations/{conversation_id}/restore",
        **answers("Bring a deleted conversation back", ConversationView, "What it shows.", 404),
    )
    async def restore_conversation(mine: Mine, conversation_id: int) -> dict[str, Any]:
        await store.do(mine.restore, conversation_id)
        return await view(mine, conversation_id)

    @routes.post(
        "/conversations/{conversation_id}/messages",
        **answers("Send a message", Started, "The job that answers it.", 400, 404, 409, status=202),
    )
    async def send_message(mine: Mine, conversation_id: int, body: NewMessage) -> dict[str, Any]:
        await store.do(mine.get, conversation_id)
        return started(await jobs.ask(conversation_id, body.parent, body.text, body.sampling.params()))

    @routes.post(
        "/messages/{message_id}/regenerate",
        **answers("Ask for further answers", Started, "The job that writes them.", 400, 404, 409, status=202),
    )
    async def regenerate(mine: Mine, message_id: int, body: Again) -> dict[str, Any]:
        await store.do(mine.message, message_id)
        return started(await jobs.regenerate(message_id, body.sampling.params()))

    @routes.post(
        "/messages/{message_id}/continue",
        **answers("Continue an answer", Started, "The job that writes it.", 400, 404, 409, status=202),
    )
    async def continue_answer(mine: Mine, message_id: int, body: Again) -> dict[str, Any]:
        """Write on where an answer was cut off or stopped."""
        await store.do(mine.message, message_id)
        return started(await jobs.continue_answer(message_id, body.sampling.params()))

    @routes.post(
        "/messages/{message_id}/choose", **answers("Choose a message", ConversationView, "What is shown after it.", 404)
    )
    async def choose(mine: Mine, message_id: int) -> dict[str, Any]:
        """Show a message among its siblings; where they are being written, stop the others."""
        message = await store.do(mine.choose, message_id)
        engine.choose_lease(lease_id_of(message_id))
        job = jobs.running_in(message.conversation)
        if job and message_id in [candidate.message.id for candidate in job.candidates]:
            others = [c.index for c in job.candidates if c.message.id != message_id and c.running]
            if others:
                await jobs.stop(job.id, others)
        return await view(mine, message.conversation)

    @routes.post(
        "/messages/{message_id}/reopen",
        **answers("Reopen a choice", ConversationView, "What is shown after it.", 400, 404),
    )
    async def reopen(mine: Mine, message_id: int) -> dict[str, Any]:
        """Lay the answers to a user message side by side again."""
        message = await store.do(mine.reopen_choice, message_id)
        return await view(mine, message.conversation)

    @routes.post(
        "/messages/delete",
        **answers(
            "Delete messages", ConversationView, "What is shown without them and what was under them.", 400, 404, 409
        ),
    )
    async def delete_messages(mine: Mine, body: MessageIds) -> dict[str, Any]:
        messages = [await store.do(mine.message, message_id) for message_id in body.ids]
        for message in messages:
            if jobs.running_in(message.conversation):
                raise ConversationBusyError("Stop the answers first, then delete.", "ids")
        under = [one for message_id in body.ids for one in await store.do(mine.subtree, message_id)]
        await store.do(mine.delete_messages, body.ids)
        engine.drop_leases(lease_ids=[lease_id_of(message_id) for message_id in under])
        return await view(mine, messages[0].conversation) if messages else {}

    @routes.post(
        "/jobs/{job_id}/stop",
        **answers("Stop answers", Stopped, "What they wrote stays; an unknown job is ignored.", 400),
    )
    async def stop(mine: Mine, job_id: str, body: StopSome) -> dict[str, Any]:
        if await job_of(mine, job_id) is not None:
            await jobs.stop(job_id, body.candidates)
        return {"stopped": job_id}

    @routes.get("/jobs/{job_id}/events", **events_answer())
    async def events(
        mine: Mine,
        request: Request,
        job_id: str,
        cursor: int | None = None,
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> Response:
        """A job's events; each id is the cursor from which to go on. 204: nothing more will come."""
        job = await job_of(mine, job_id)
        if job is None:
            return Response(status_code=204)
        if last_event_id is not None and last_event_id.isdigit():
            cursor = int(last_event_id)
            if job.done.is_set() and cursor >= len(job.log):
                return Response(status_code=204)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(_event_stream(job, cursor), 200, headers, "text/event-stream")

    @routes.post(
        "/count", **answers("Count tokens", Counted, "What the branch and the draft take of the window.", 400, 404)
    )
    async def count(mine: Mine, body: Draft) -> dict[str, Any]:
        """How many of the window's tokens the branch and the draft take, exactly; null where no tokenizer is here."""
        path = await store.do(mine.path_to, body.parent)
        system_prompt = body.system_prompt
        if body.conversation is not None:
            system_prompt = (await store.do(mine.get, body.conversation)).system_prompt
        window = engine.info.max_model_len if engine.info else None
        if tokenizer_provider is None:
            return {"history": None, "draft": None, "window": window}
        history = len(branch_token_ids(path))
        if not body.text.strip():
            return {"history": history, "draft": 0, "window": window}
        draft = Message(id=0, conversation=0, parent=body.parent, role="user", text=body.text)
        try:
            tokenizer = await asyncio.to_thread(tokenizer_provider)
            prompt = await asyncio.to_thread(build_prompt, tokenizer, system_prompt, [*path, draft])
        except LocalpagedError:
            return {"history": history, "draft": None, "window": window}
        return {
            "history": min(history, prompt.num_kept),
            "draft": len(prompt.token_ids) - min(history, prompt.num_kept),
            "window": window,
        }

    return routes


async def _event_stream(job: Job, cursor: int | None) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    async for place, event in job.follow(cursor):
        if event is None:
            yield b": still here\n\n"
        else:
            yield b"id: %d\ndata: %s\n\n" % (place, msgspec.json.encode(event))


def job_json(job: Job) -> dict[str, Any]:
    """messages: the answers that it writes, in the order in which its events number them."""
    return {"id": job.id, "user": job.user.id, "messages": [candidate.message.id for candidate in job.candidates]}


def conversation_json(conversation: Conversation) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(conversation)
    del fields["chosen_root"]
    return fields


def message_json(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message)
    fields["num_token_ids"] = len(fields.pop("token_ids"))
    return fields
