"""The conversations of whoever sent a request: others are as if they were not there."""

from typing import Annotated

from fastapi import Depends, Request

from localpaged.store.conversations import Conversations


def conversations_of(request: Request) -> Conversations:
    """Raises AttributeError where no guard has said whose request it is, rather than to show everybody's."""
    mine: Conversations = request.app.state.store.conversations.of(request.state.user)
    return mine


Mine = Annotated[Conversations, Depends(conversations_of)]
