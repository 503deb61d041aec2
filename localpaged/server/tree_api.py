"""Conversations as the trees that they are: every message, one branch, copies, and messages found by their words."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from localpaged.server.chat_api import conversation_json, message_json
from localpaged.server.mine import Mine
from localpaged.server.native_schema import BranchAnswer, ConversationAnswer, FoundMessages, TreeAnswer, answers
from localpaged.store.message_search import search_messages
from localpaged.store.store import Store
from localpaged.store.transfer import MAX_TITLE_CHARS, branch_off, duplicate, messages_of

LARGEST_ID = (1 << 63) - 1


class CopyTitle(BaseModel):
    """The copy's title; without it that of the original, marked as a copy."""

    model_config = ConfigDict(extra="forbid")
    title: str | None = Field(default=None, max_length=MAX_TITLE_CHARS)


def router(store: Store) -> APIRouter:
    """The routes of trees, copies and the search."""
    routes = APIRouter(prefix="/api", tags=["conversations"])

    @routes.get(
        "/conversations/{conversation_id}/tree",
        **answers("Every message of a conversation", TreeAnswer, "The whole tree, whatever is shown.", 404),
    )
    async def tree(mine: Mine, conversation_id: int) -> dict[str, Any]:
        conversation = await store.do(mine.get, conversation_id)
        messages = await store.do(messages_of, mine, conversation_id)
        chosen = {message.chosen_child for message in messages} | {conversation.chosen_root}
        return {
            "conversation": conversation_json(conversation),
            "messages": [{**message_json(message), "chosen": message.id in chosen} for message in messages],
        }

    @routes.get(
        "/messages/{message_id}/branch",
        **answers("The path to a message", BranchAnswer, "The messages from the root to this one.", 404),
    )
    async def branch(mine: Mine, message_id: int) -> dict[str, Any]:
        await store.do(mine.message, message_id)
        return {"messages": [message_json(message) for message in await store.do(mine.path_to, message_id)]}

    @routes.post(
        "/conversations/{conversation_id}/duplicate",
        **answers("Copy a conversation", ConversationAnswer, "The copy, with every branch.", 400, 404, status=201),
    )
    async def duplicate_conversation(mine: Mine, conversation_id: int, body: CopyTitle | None = None) -> dict[str, Any]:
        """Token ids are copied too, so the copy starts from what is kept of the original's KV."""
        return conversation_json(await store.do(duplicate, mine, conversation_id, body.title if body else None))

    @routes.post(
        "/messages/{message_id}/fork",
        **answers(
            "Branch into a new conversation", ConversationAnswer, "It ends with this message.", 400, 404, status=201
        ),
    )
    async def fork(mine: Mine, message_id: int, body: CopyTitle | None = None) -> dict[str, Any]:
        """Copy the messages from the root to this one, with their token ids, into a conversation of their own."""
        return conversation_json(await store.do(branch_off, mine, message_id, body.title if body else None))

    @routes.get(
        "/search",
        **answers("Find messages by their words", FoundMessages, "The latest first, from every branch.", 400, 404),
    )
    async def search(
        mine: Mine,
        query: str,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        before: Annotated[int | None, Query(ge=0, le=LARGEST_ID)] = None,
        conversation: Annotated[int | None, Query(ge=0, le=LARGEST_ID)] = None,
    ) -> dict[str, Any]:
        """Every word must be there, the last one as a beginning. For the next page give `next` as `before`."""
        hits = await store.do(search_messages, mine, query, limit + 1, before, conversation)
        page = hits[:limit]
        return {"hits": msgspec.to_builtins(page), "next": page[-1].message if len(hits) > limit else None}

    return routes
