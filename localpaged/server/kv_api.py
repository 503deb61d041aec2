"""/api/kv: the pool's audit, where each conversation's KV is, and what a turn would cost."""

from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel

from localpaged.engine.client import EngineClient
from localpaged.engine.messages import ModelInfo, Residency
from localpaged.errors import InvalidRequestError, ModelError
from localpaged.server.engine_handle import EngineHandle
from localpaged.server.history import branch_token_ids
from localpaged.server.mine import Mine
from localpaged.server.native_schema import Dropped, Pinned, PoolAnswer, Price, ResidencyList, answers
from localpaged.store.conversations import Conversations
from localpaged.store.message import NotFoundError
from localpaged.store.store import Store
from localpaged.store.transfer import conversation_ids


class Pin(BaseModel):
    pinned: bool


def router(engine: EngineClient, store: Store) -> APIRouter:
    """Everything under /api/kv."""
    routes = APIRouter(prefix="/api/kv", tags=["kv"])

    def check_ready() -> None:
        if engine.state != "ready":
            raise ModelError("The model is not loaded. Try again when /health answers 200.")

    async def title_of(mine: Conversations, conversation_id: int) -> str | None:
        """None for somebody else's conversation; empty for one that was deleted, whose KV is still there."""
        for chats in (mine, store.conversations):
            try:
                title = (await store.do(chats.get, conversation_id)).title
            except NotFoundError:
                continue
            return title if chats is mine else None
        return ""

    @routes.get("", **answers("The pool of blocks", PoolAnswer, "Its audit, and where each conversation's KV is.", 503))
    async def kv(mine: Mine, conversations: bool = True) -> dict[str, Any]:
        """The pool's audit, and where each conversation's KV is unless conversations is false."""
        check_ready()
        stats = await engine.stats()
        return {**stats, **(await list_conversations(mine) if conversations else {})}

    @routes.get("/conversations", **answers("Where KV is", ResidencyList, "The latest used first.", 503))
    async def list_conversations(mine: Mine) -> dict[str, Any]:
        """Where each conversation's KV is, the latest used first."""
        check_ready()
        bytes_per_block = engine.info.bytes_per_block if engine.info else 0
        found = []
        for one in await engine.residency():
            title = await title_of(mine, int(one.conversation))
            if title is not None:
                found.append({**residency_json(one, bytes_per_block, on_gpu(engine)), "title": title})
        return {"conversations": found}

    @routes.post(
        "/conversations/{conversation_id}/pin",
        **answers("Pin a conversation's KV", Pinned, "Whether it is pinned.", 400, 404, 503),
    )
    async def pin(mine: Mine, conversation_id: int, body: Pin) -> dict[str, Any]:
        """Let this conversation's KV be the last to give way, or no longer. That of one pinned in the list stays so."""
        check_ready()
        conversation = await store.do(mine.update, conversation_id, kv_pinned=body.pinned)
        engine.pin(str(conversation_id), conversation.pinned or conversation.kv_pinned)
        return {"conversation": conversation_id, "pinned": body.pinned}

    @routes.delete(
        "/conversations/{conversation_id}", **answers("Forget a conversation's KV", Dropped, "It is forgotten.", 503)
    )
    async def drop(mine: Mine, conversation_id: int) -> dict[str, Any]:
        """Forget a conversation's KV, in memory and on disk. Its text stays; the next turn computes it again."""
        check_ready()
        if await title_of(mine, conversation_id) is None:
            await store.do(mine.get, conversation_id)
        engine.drop_leases(conversation=str(conversation_id))
        return {"dropped": conversation_id}

    @routes.delete("/conversations", **answers("Forget all KV", Dropped, "It is forgotten.", 503))
    async def drop_all(mine: Mine) -> dict[str, Any]:
        """Forget the KV of all conversations, in memory and on disk; a user's call, that of the user's own."""
        check_ready()
        if mine.owner == "":
            engine.drop_leases()
        else:
            for conversation_id in await store.do(conversation_ids, mine):
                engine.drop_leases(conversation=str(conversation_id))
        return {"dropped": "all"}

    @routes.get("/estimate", **answers("The price of a turn", Price, "Tokens, blocks and seconds.", 400, 503))
    async def estimate(
        mine: Mine,
        conversation: int | None = None,
        parent: int | None = None,
        tokens: int = 0,
        n: int = 1,
        max_tokens: int | None = None,
    ) -> dict[str, Any]:
        """The price of a message of so many tokens under an answer (parent), with n answers.

        num_blocks at most, num_moved_blocks of them held for other conversations now; seconds to the first token and
        until every answer has all of its tokens, by the rates that this machine has shown.
        """
        check_ready()
        for name, value, least in (("tokens", tokens, 0), ("n", n, 1), ("max_tokens", max_tokens, 1)):
            if value is not None and not least <= value <= 1_000_000:
                raise InvalidRequestError(f"{name} is {value}; it must be at least {least}.", name)
        if conversation is not None:
            await store.do(mine.get, conversation)
        history = branch_token_ids(await store.do(mine.path_to, parent))
        # What is being written is not known to the token: none of it can be there already.
        prompt = history + [0] * max(tokens, 0 if history else 1)
        price = await engine.estimate(prompt, None if conversation is None else str(conversation), n, max_tokens)
        fields: dict[str, Any] = msgspec.to_builtins(price)
        return {**fields, "first_token_s": round(price.first_token_s, 3), "total_s": round(price.total_s, 3)}

    return routes


def residency_json(one: Residency, bytes_per_block: int, gpu: bool) -> dict[str, Any]:
    """A conversation's residency, with its tier and the bytes that it holds in memory."""
    fields: dict[str, Any] = msgspec.to_builtins(one)
    return {**fields, "tier": tier_of(one, gpu), "num_bytes": one.num_blocks * bytes_per_block}


def on_gpu(engine: EngineHandle) -> bool:
    """Whether the pool is in a GPU's memory."""
    return isinstance(engine.info, ModelInfo) and engine.info.device.startswith("cuda")


def tier_of(one: Residency, gpu: bool) -> str:
    """The nearest place where KV of a conversation is: "gpu" (its pool), "host" (a CPU engine's too), or "disk"."""
    if one.num_blocks:
        return "gpu" if gpu else "host"
    return "host" if one.num_host_tokens else "disk"
