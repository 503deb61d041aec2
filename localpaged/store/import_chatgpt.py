"""Conversations of ChatGPT's data export, conversations.json: a mapping of nodes, each with a message and a parent.

Taken over: what the person and the model wrote to each other, every branch, the one that was shown, times, models, and
the person's instructions as the system prompt. Everything else is counted. The format is not documented by its maker;
this follows the files that it gave out up to 2026.
"""

import re
from typing import Any

import msgspec

from localpaged.store.foreign_tree import ForeignMessage, ForeignNode, build_tree, moment
from localpaged.store.losses import Losses
from localpaged.store.transcript import Transcript

PLACEHOLDER = "the text has a note in its place"
LEFT_OUT = "only what was said is taken over"
MEDIA = {"image": "image", "audio": "audio", "real_time": "audio", "video": "video"}
CITATION = re.compile("\ue200[^\ue200\ue201]{0,2000}\ue201")
FINISH_REASONS = {"max_tokens": "length", "interrupted": "cancelled"}
# The kinds of content that are no part of what was said.
ASIDES = {
    "thoughts": "reasoning",
    "reasoning_recap": "reasoning",
    "execution_output": "code interpreter output",
    "tether_browsing_display": "web page",
    "tether_quote": "web page",
    "sonic_webpage": "web page",
    "model_editable_context": "memory",
    "system_error": "error message",
}


class _Author(msgspec.Struct):
    role: str = ""


class _Content(msgspec.Struct):
    content_type: str = "text"
    parts: list[Any] | None = None
    text: Any = None
    language: Any = None
    user_profile: Any = None
    user_instructions: Any = None


class _Message(msgspec.Struct):
    author: _Author
    content: _Content | None = None
    create_time: Any = None
    status: Any = None
    recipient: Any = None
    metadata: dict[str, Any] | None = None


class _Node(msgspec.Struct):
    message: _Message | None = None
    parent: str | None = None
    children: list[str] | None = None


class ChatGptConversation(msgspec.Struct):
    """One element of conversations.json; what is not named here is not read."""

    mapping: dict[str, _Node]
    title: str | None = None
    create_time: Any = None
    update_time: Any = None
    current_node: str | None = None
    is_starred: bool | None = None

    def transcript(self, now: float, losses: Losses) -> Transcript:
        """The conversation as the store takes it. Raises InvalidRequestError when its nodes are no tree."""
        created = moment(self.create_time) or now
        prompts: list[str] = []
        nodes = {}
        for node_id, node in self.mapping.items():
            message = None if node.message is None else _taken_over(node.message, prompts, losses)
            nodes[node_id] = ForeignNode(node.parent, node.children or [], message)
        messages, chosen_root = build_tree(nodes, self.current_node, created, losses)
        return Transcript(
            title=self.title or "",
            system_prompt="\n\n".join(dict.fromkeys(prompts)),
            pinned=bool(self.is_starred),
            created=created,
            updated=moment(self.update_time) or created,
            chosen_root=chosen_root,
            messages=messages,
        )


def _taken_over(message: _Message, prompts: list[str], losses: Losses) -> ForeignMessage | None:
    """The message as it is kept, or None; instructions are added to prompts."""
    content, metadata = message.content or _Content(), message.metadata or {}
    role, kind = message.author.role, content.content_type
    if kind == "user_editable_context":
        prompts += [
            text for text in (content.user_profile, content.user_instructions) if isinstance(text, str) and text
        ]
        return None
    if kind in ASIDES:
        losses.add(ASIDES[kind], LEFT_OUT)
        return None
    text = _text(content, losses)
    if role == "system":
        if text.strip():
            prompts.append(text)
        return None
    if metadata.get("is_visually_hidden_from_conversation"):
        losses.add("hidden message", LEFT_OUT, count=bool(text.strip()))
        return None
    if role == "assistant" and message.recipient not in (None, "all"):
        losses.add("tool call", LEFT_OUT)
        return None
    if role == "tool":
        # Pictures that the model made come as a tool's output.
        if "[image]" not in text or kind != "multimodal_text":
            losses.add("tool output", LEFT_OUT, count=bool(text.strip()))
            return None
        role, text = "assistant", "[image]"
    if role not in ("user", "assistant"):
        losses.add(f"message of {role[:40] or 'nobody'}", "there is no such role here")
        return None
    if role == "user":
        text = "\n".join([text, *_attachments(metadata, losses)]).strip("\n")
    elif not text:
        return None
    model = metadata.get("model_slug")
    details = metadata.get("finish_details")
    ended = details.get("type") if isinstance(details, dict) else None
    return ForeignMessage(
        role,  # type: ignore[arg-type]
        text,
        created=moment(message.create_time),
        model=model if isinstance(model, str) and role == "assistant" else None,
        finish_reason=FINISH_REASONS.get(str(ended), "stop") if role == "assistant" else None,
        interrupted=role == "assistant" and message.status == "in_progress",
    )


def _text(content: _Content, losses: Losses) -> str:
    if content.content_type == "code" and isinstance(content.text, str):
        language = content.language if isinstance(content.language, str) and content.language != "unknown" else ""
        return f"```{language}\n{content.text}\n```"
    if content.content_type not in ("text", "multimodal_text", "code"):
        losses.add(f"content of the kind {content.content_type[:40]}", "only its text is taken over")
    parts = content.parts if content.parts is not None else [content.text]
    texts = [_part(part, losses) for part in parts]
    text = "\n".join(part for part in texts if part)
    cleaned, num_citations = CITATION.subn("", text)
    losses.add("citation", LEFT_OUT, num_citations)
    return cleaned


def _part(part: Any, losses: Losses) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        losses.add("part that is no text", LEFT_OUT, count=part is not None)
        return ""
    kind = str(part.get("content_type") or "unknown")[:40]
    if isinstance(part.get("text"), str):
        return str(part["text"])
    name = next((name for begin, name in MEDIA.items() if kind.startswith(begin)), kind)
    losses.add(name, PLACEHOLDER)
    return f"[{name}]"


def _attachments(metadata: dict[str, Any], losses: Losses) -> list[str]:
    """A note for each attached file; pictures have theirs in the text."""
    notes = []
    given = metadata.get("attachments")
    for one in given if isinstance(given, list) else []:
        mime = one.get("mime_type") or one.get("mimeType") if isinstance(one, dict) else None
        if isinstance(one, dict) and not str(mime).startswith("image/"):
            losses.add("attached file", PLACEHOLDER)
            notes.append(f"[file: {str(one.get('name') or 'unnamed')[:200]}]")
    return notes
