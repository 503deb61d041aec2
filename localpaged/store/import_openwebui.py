"""Chats of Open WebUI's export: a list whose elements hold `chat.history`, messages by id with parentId.

Source: https://github.com/open-webui/open-webui (backend/open_webui/models/chats.py, the chat that the page stores).
"""

import re
from typing import Any

import msgspec

from localpaged.store.foreign_tree import ForeignMessage, ForeignNode, build_tree, moment
from localpaged.store.losses import Losses
from localpaged.store.transcript import Transcript

PLACEHOLDER = "the text has a note in its place"
LEFT_OUT = "only what was said is taken over"
# What the server writes into an answer's text for the page to fold.
DETAILS = re.compile(r'<details type="(\w{1,40})"')
DETAILS_END = "</details>"
DETAIL_NAMES = {"tool_calls": "tool call", "code_interpreter": "code interpreter output"}


class _Message(msgspec.Struct, rename="camel"):
    role: str
    content: Any = ""
    parent_id: str | None = None
    children_ids: list[str] | None = None
    timestamp: Any = None
    model: Any = None
    done: Any = None
    error: Any = None
    files: Any = None
    sources: Any = None


class _History(msgspec.Struct, rename="camel"):
    messages: dict[str, _Message] = {}
    current_id: str | None = None


class _Chat(msgspec.Struct):
    title: str | None = None
    history: _History | None = None
    messages: list[_Message] | None = None
    params: Any = None
    system: Any = None
    timestamp: Any = None


class OpenWebUiConversation(msgspec.Struct):
    """One element of the export; what is not named here is not read."""

    chat: _Chat
    title: str | None = None
    created_at: Any = None
    updated_at: Any = None
    pinned: bool | None = None

    def transcript(self, now: float, losses: Losses) -> Transcript:
        """The conversation as the store takes it. Raises InvalidRequestError when its messages are no tree."""
        chat = self.chat
        created = moment(self.created_at) or moment(chat.timestamp) or now
        prompts = [chat.system, chat.params.get("system") if isinstance(chat.params, dict) else None]
        messages, current = _history(chat)
        nodes = {}
        for message_id, message in messages.items():
            if message.role == "system":
                prompts.append(_text(message.content, losses))
            kept = _taken_over(message, losses)
            nodes[message_id] = ForeignNode(message.parent_id, message.children_ids or [], kept)
        tree, chosen_root = build_tree(nodes, current, created, losses)
        return Transcript(
            title=self.title or chat.title or "",
            system_prompt="\n\n".join(
                dict.fromkeys(text for text in prompts if isinstance(text, str) and text.strip())
            ),
            pinned=bool(self.pinned),
            created=created,
            updated=moment(self.updated_at) or created,
            chosen_root=chosen_root,
            messages=tree,
        )


def _history(chat: _Chat) -> tuple[dict[str, _Message], str | None]:
    """The messages by id and the end of the shown branch; old chats have only that branch, as a list."""
    if chat.history is not None and chat.history.messages:
        return chat.history.messages, chat.history.current_id
    line: dict[str, _Message] = {}
    for place, message in enumerate(chat.messages or []):
        message.parent_id = str(place - 1) if place else None
        message.children_ids = []
        line[str(place)] = message
    return line, str(len(line) - 1)


def _taken_over(message: _Message, losses: Losses) -> ForeignMessage | None:
    role = message.role
    if role == "system":
        return None
    if role not in ("user", "assistant"):
        losses.add("tool output" if role == "tool" else f"message of {role[:40] or 'nobody'}", LEFT_OUT)
        return None
    text = "\n".join([_text(message.content, losses), *_files(message.files, losses)]).strip("\n")
    if isinstance(message.sources, list):
        losses.add("citation", LEFT_OUT, len(message.sources))
    error = message.error.get("content") if isinstance(message.error, dict) else message.error
    is_answer = role == "assistant"
    return ForeignMessage(
        role,  # type: ignore[arg-type]
        text,
        created=moment(message.timestamp),
        model=message.model if isinstance(message.model, str) and is_answer else None,
        finish_reason="stop" if is_answer and not error and message.done is not False else None,
        error=(error if isinstance(error, str) and error else "It failed.") if error and is_answer else None,
        interrupted=is_answer and message.done is False,
    )


def _text(content: Any, losses: Losses) -> str:
    """The text of a string, or of a list of parts as the OpenAI API has them."""
    if isinstance(content, str):
        return _without_details(content, losses)
    texts = []
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            texts += _files([part], losses)
    return "\n".join(texts)


def _without_details(text: str, losses: Losses) -> str:
    """The text without what the page folds. What does not end stays."""
    kept, place = [], 0
    while opened := DETAILS.search(text, place):
        end = text.find(DETAILS_END, opened.end())
        if end < 0:
            break
        losses.add(DETAIL_NAMES.get(opened[1], opened[1]), LEFT_OUT)
        kept.append(text[place : opened.start()])
        place = end + len(DETAILS_END)
    return "".join([*kept, text[place:]]).strip("\n") if place else text


def _files(files: Any, losses: Losses) -> list[str]:
    """A note for each picture or file."""
    notes = []
    for one in files if isinstance(files, list) else []:
        kind = str(one.get("type") or "file") if isinstance(one, dict) else "file"
        name = "image" if kind.startswith("image") else "audio" if "audio" in kind else "attached file"
        losses.add(name, PLACEHOLDER)
        label = one.get("name") if isinstance(one, dict) else None
        notes.append(f"[{name}]" if name != "attached file" else f"[file: {str(label or 'unnamed')[:200]}]")
    return notes
