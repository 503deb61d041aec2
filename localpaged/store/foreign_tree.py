"""Another program's tree of messages made one of ours: turns of one user and one assistant, in order, with choices.

Theirs has nodes without messages, several messages of one side behind each other (around calls of tools, say), and
forks anywhere. Consecutive messages of one side become one; a node without a message hands its children on.
"""

from dataclasses import dataclass, field
from typing import Any

from localpaged.errors import InvalidRequestError
from localpaged.store.losses import Losses
from localpaged.store.message import Role
from localpaged.store.transcript import LATEST, TranscriptMessage

# How many times its length a conversation may take when what branches share is written into each of them.
MAX_GROWTH = 10


@dataclass(slots=True)
class ForeignMessage:
    """What is taken over of a message."""

    role: Role
    text: str
    created: float | None = None
    model: str | None = None
    finish_reason: str | None = None
    error: str | None = None
    interrupted: bool = False


@dataclass(slots=True)
class ForeignNode:
    """One node; children gives their order. Without a message it only joins others."""

    parent: str | None
    children: list[str]
    message: ForeignMessage | None


@dataclass(slots=True, eq=False)
class _Entry:
    """A message of the tree to be; before: the one that its text goes on from, where both are of one side."""

    message: ForeignMessage
    parent: "_Entry | None"
    before: "_Entry | None" = None
    after: "_Entry | None" = None
    num_chars: int = 0
    children: "list[_Entry]" = field(default_factory=list)
    chosen: "_Entry | None" = None
    candidate: int | None = None
    number: int = 0


def moment(value: Any) -> float | None:
    """Seconds since 1970 of what may be seconds, milli-, micro- or nanoseconds; None for what makes no sense."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e20:
        return None
    for size in (1e17, 1e14, 1e11):
        if value > size:
            value = value / (size / 1e8)
            break
    return float(value) if value <= LATEST else None


def build_tree(
    nodes: dict[str, ForeignNode], current: str | None, created: float, losses: Losses
) -> tuple[list[TranscriptMessage], int | None]:
    """The messages, each behind its parent, and the number of the root that is shown.

    current: the node at the end of the shown branch. Raises InvalidRequestError when the nodes are no tree.
    """
    entries, at = _join(nodes, losses)
    total = sum(entry.num_chars for entry in entries if entry.children or entry.after is None)
    if total > MAX_GROWTH * sum(len(entry.message.text) + 2 for entry in entries) + 1_000_000:
        raise InvalidRequestError("Its branches share too much text to be written out.", "body")
    kept = [entry for entry in entries if entry.children or entry.after is None]
    roots = [entry for entry in kept if entry.parent is None]
    for entry in kept:
        entry.children = [child for child in entry.children if child.children or child.after is None]
        entry.chosen = entry.children[-1] if entry.children else None
        answers = [child for child in entry.children if child.message.role == "assistant"]
        for candidate, child in enumerate(answers):
            child.candidate = candidate
    chosen_root = roots[-1] if roots else None
    shown = at.get(current or "")
    while shown is not None and not shown.children and shown.after is not None:
        shown = shown.after
    while shown is not None:
        if shown.parent is None:
            chosen_root = shown
        else:
            shown.parent.chosen = shown
        shown = shown.parent
    for number, entry in enumerate(kept, 1):
        entry.number = number
    return [_written(entry, created) for entry in kept], chosen_root.number if chosen_root else None


def _join(nodes: dict[str, ForeignNode], losses: Losses) -> tuple[list[_Entry], dict[str, _Entry | None]]:
    """An entry for each message, parents first, siblings in order; and the entry at or above each node."""
    below: dict[str | None, list[str]] = {}
    for node_id, node in nodes.items():
        known = node.parent in nodes
        if node.parent is not None and not known:
            losses.add("message whose parent is missing", "it begins a branch of its own")
        below.setdefault(node.parent if known else None, []).append(node_id)
    places: dict[str | None, dict[str, int]] = {
        node_id: {child: place for place, child in enumerate(node.children)} for node_id, node in nodes.items()
    }
    entries: list[_Entry] = []
    at: dict[str, _Entry | None] = {}
    opening: _Entry | None = None
    pending: list[tuple[str, _Entry | None]] = [(node_id, None) for node_id in reversed(below.get(None, []))]
    while pending:
        node_id, above = pending.pop()
        message = nodes[node_id].message
        if message is not None and message.role == "assistant" and above is None:
            if opening is None:
                losses.add("answer at the beginning", "a message without text is put before it")
                opening = _Entry(ForeignMessage("user", "", message.created), None)
                entries.append(opening)
            above = opening
        if message is not None and above is not None and above.message.role == message.role:
            entry = _Entry(message, above.parent, above, num_chars=above.num_chars + len(message.text) + 2)
            above.after = entry
        elif message is not None:
            entry = _Entry(message, above, num_chars=len(message.text))
        if message is not None:
            if entry.parent is not None:
                entry.parent.children.append(entry)
            entries.append(entry)
            above = entry
        at[node_id] = above
        order = places[node_id]
        children = sorted(below.get(node_id, []), key=lambda child: order.get(child, len(order)))
        pending += [(child, above) for child in reversed(children)]
    if len(at) < len(nodes):
        raise InvalidRequestError(
            f"{len(nodes) - len(at)} of its messages are in a circle, each under another.", "body"
        )
    return entries, at


def _written(entry: _Entry, created: float) -> TranscriptMessage:
    message = entry.message
    pieces: list[str] = []
    one: _Entry | None = entry
    while one is not None:
        pieces.append(one.message.text)
        one = one.before
    parent = entry.parent
    state = "error" if message.error else "interrupted" if message.interrupted else "complete"
    return TranscriptMessage(
        id=entry.number,
        parent=parent.number if parent else None,
        role=message.role,
        text="\n\n".join(piece for piece in reversed(pieces) if piece),
        state=state,  # type: ignore[arg-type]
        created=message.created if message.created is not None else created,
        candidate=entry.candidate,
        chosen_child=entry.chosen.number if entry.chosen else None,
        model=message.model,
        finish_reason=message.finish_reason,
        error=message.error,
    )
