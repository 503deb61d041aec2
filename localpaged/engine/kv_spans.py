"""Spans: runs of KV blocks outside the pool, found by the tokens that they hold.

A span follows the blocks of another one, or nothing, so what several branches have in common is stored once. Each
block is named by a hash over all tokens up to its end, and a hit compares the tokens themselves.
Knows token ids and arrays; where a store keeps its bytes is its own affair. Nothing of pools, tensors or models.
"""

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

KV = NDArray[Any]


class ArrivingKV(Protocol):
    """Blocks on their way to this memory; np.asarray() waits for them."""

    @property
    def nbytes(self) -> int: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> KV: ...


ROOT = b""


class KvReadError(Exception):
    """A span is not what it was when it was written."""


@dataclass(slots=True, eq=False)
class Span:
    """token_ids fill the span's blocks one after the other, the last one perhaps in part.

    key: a name of its own; parent: name of the block before the first; names: of its full blocks
    conversation, lease_id: whose it is; empty when only others need it any more. used: seconds since 1970
    """

    key: str
    parent: bytes
    token_ids: list[int]
    names: list[bytes]
    num_bytes: int
    conversation: str
    lease_id: str
    used: float

    def tail(self, block_size: int) -> list[int]:
        """The tokens of the block that is filled in part."""
        return self.token_ids[len(self.names) * block_size :]


@dataclass(slots=True)
class Part:
    """Blocks [first, end) of a span in a store."""

    store: "SpanStore"
    span: Span
    first: int
    end: int


@dataclass(slots=True)
class Found:
    """The first num_tokens tokens of a text are in these parts, one after the other from block first_block on."""

    num_tokens: int = 0
    first_block: int = 0
    parts: list[Part] = field(default_factory=list)

    def add(self, store: "SpanStore", span: Span, place: int, num_tokens: int) -> None:
        """Go on with the block at a place of a span, of which num_tokens tokens are wanted."""
        last = self.parts[-1] if self.parts else None
        if last is not None and last.span is span and last.end == place:
            last.end += 1
        else:
            self.parts.append(Part(store, span, place, place + 1))
        self.num_tokens += num_tokens

    def leave_out(self, num_blocks: int) -> None:
        """Do without the first blocks of the text, which are at hand."""
        while self.parts and self.first_block < num_blocks:
            part = self.parts[0]
            step = min(num_blocks - self.first_block, part.end - part.first)
            part.first += step
            self.first_block += step
            if part.first == part.end:
                del self.parts[0]

    def seconds(self) -> float:
        """How long reading takes; a span is read as a whole."""
        return sum(part.span.num_bytes / part.store.read_bytes_s for part in self.parts)


def block_names(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The name of each full block: a hash over every token up to its end."""
    names, name = [], ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = np.asarray(token_ids[start : start + block_size], dtype=np.int64)
        name = hashlib.blake2b(name + block.tobytes(), digest_size=16).digest()
        names.append(name)
    return names


def find(stores: Sequence["SpanStore"], token_ids: list[int]) -> Found:
    """The longest beginning of a text that is in some stores, each block from the first that has it."""
    if not stores:
        return Found()
    found, size, parent = Found(), stores[0].block_size, ROOT
    for name in block_names(token_ids, size):
        wanted = token_ids[found.num_tokens : found.num_tokens + size]
        hits = ((store, store.block(name, wanted)) for store in stores)
        hit = next(((store, *place) for store, place in hits if place is not None), None)
        if hit is None:
            break
        found.add(*hit, size)
        parent = name
    rest = token_ids[found.num_tokens : found.num_tokens + size]
    tails = [(*store.longest_tail(parent, rest), store) for store in stores]
    num_common, span, store = max(tails, key=lambda tail: tail[0])
    if span is not None and num_common:
        found.add(store, span, len(span.names), num_common)
    return found


class SpanStore(ABC):
    """Spans of at most most_bytes together; the least recently used give way. Any thread may call it.

    read_bytes_s: how fast reading has been, to begin with a guess
    """

    def __init__(self, block_size: int, most_bytes: int, read_bytes_s: float) -> None:
        self.block_size = block_size
        self.most_bytes = most_bytes
        self.read_bytes_s = read_bytes_s
        self._lock = threading.RLock()
        self._spans: dict[str, Span] = {}
        # The spans with a block, and its place there: one, or several that were written at once.
        self._by_name: dict[bytes, list[tuple[Span, int]]] = {}
        self._tails: dict[bytes, list[Span]] = {}

    @abstractmethod
    def read(self, span: Span, first: int, end: int) -> KV:
        """Blocks [first, end) of a span. Raises KvReadError, and drops the span, when it does not verify."""

    @abstractmethod
    def _put(self, span: Span, kv: KV | ArrivingKV) -> bool:
        """Keep a span's bytes and note their number in it; whether that was done."""

    @abstractmethod
    def _delete(self, span: Span) -> None:
        """Let a span's bytes go."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all spans."""
        return sum(span.num_bytes for span in list(self._spans.values()))

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans.values())

    def block(self, name: bytes, token_ids: list[int]) -> tuple[Span, int] | None:
        """The span with the block of this name and these tokens, and its place there."""
        with self._lock:
            hits = list(self._by_name.get(name, []))
        for span, place in reversed(hits):
            start = place * self.block_size
            if span.token_ids[start : start + self.block_size] == token_ids:
                return span, place
        return None

    def longest_tail(self, parent: bytes, token_ids: list[int]) -> tuple[int, Span | None]:
        """The span whose partly filled block after parent has the most of these tokens, and how many."""
        with self._lock:
            tails = [
                (len(commonprefix([one.tail(self.block_size), token_ids])), one) for one in self._tails.get(parent, [])
            ]
        return max(tails, key=lambda tail: tail[0], default=(0, None))

    def find(self, token_ids: list[int]) -> Found:
        """The longest beginning of a text that is here."""
        return find([self], token_ids)

    def num_stored(self, token_ids: list[int]) -> int:
        """How many of the tokens need no new span: full blocks, or all of them."""
        num_found = self.find(token_ids).num_tokens
        return num_found if num_found == len(token_ids) else num_found // self.block_size * self.block_size

    def write(
        self, kv: KV | ArrivingKV, token_ids: list[int], num_before: int, conversation: str, lease_id: str
    ) -> bool:
        """Store the blocks of token_ids[num_before:], num_before whole blocks in; whether they are here now.

        kv: [blocks, ...]
        """
        names = block_names(token_ids, self.block_size)
        first = num_before // self.block_size
        parent = names[first - 1] if first else ROOT
        span = self._span(parent, token_ids[num_before:], names[first:], conversation, lease_id)
        return self._write(span, kv)

    def _span(self, parent: bytes, own: list[int], names: list[bytes], conversation: str, lease_id: str) -> Span:
        key = hashlib.blake2b(parent + np.asarray(own, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
        return Span(key, parent, own, names, 0, conversation, lease_id, time.time())

    def _write(self, span: Span, kv: KV | ArrivingKV) -> bool:
        if span.key in self._spans:
            return True
        span.num_bytes = kv.nbytes
        if not self._put(span, kv):
            return False
        self._add(span)
        self._make_room()
        return True

    def drop(self, spans: Iterable[Span]) -> None:
        """Delete spans, and with each those that follow it and no other, which cannot be used without it."""
        with self._lock:
            waiting = list(spans)
            while waiting:
                span = waiting.pop()
                if self._remove(span):
                    waiting += [
                        other
                        for other in self._spans.values()
                        if other.parent in span.names and other.parent not in self._by_name
                    ]

    def _remove(self, span: Span) -> bool:
        """Delete one span; whether it was here."""
        if self._spans.pop(span.key, None) is None:
            return False
        self._delete(span)
        for name in span.names:
            self._by_name[name] = [hit for hit in self._by_name[name] if hit[0] is not span]
            if not self._by_name[name]:
                del self._by_name[name]
        for tails in self._tails.values():
            if span in tails:
                tails.remove(span)
        return True

    def drop_conversation(self, conversation: str | None) -> None:
        """Delete all of a conversation that no other one needs, or everything."""
        self._forget(lambda span: conversation is None or span.conversation == conversation)

    def drop_leases(self, lease_ids: Iterable[str]) -> None:
        """Delete all of these answers that nothing else needs."""
        names = set(lease_ids)
        self._forget(lambda span: span.lease_id in names)

    def _forget(self, wanted: Callable[[Span], bool]) -> None:
        while leaves := [span for span in self._leaves() if wanted(span) or not span.conversation]:
            self.drop(leaves)
        for span in self.spans():
            if wanted(span):
                self._cut(span)

    def _cut(self, span: Span) -> None:
        """Keep of a span the blocks that others follow, as nobody's, and no token more."""
        parents = {other.parent for other in self.spans()}
        needed = max((place + 1 for place, name in enumerate(span.names) if name in parents), default=0)
        own, names = span.token_ids[: needed * self.block_size], span.names[:needed]
        rest = self._span(span.parent, own, names, "", "")
        try:
            kv = np.ascontiguousarray(self.read(span, 0, needed))
        except KvReadError:
            return  # It is gone, with what followed it.
        with self._lock:
            self._remove(span)
            if not self._write(rest, kv):
                self.drop([other for other in self._spans.values() if other.parent in span.names])

    def _leaves(self) -> list[Span]:
        spans = self.spans()
        parents = {span.parent for span in spans}
        return [span for span in spans if not any(name in parents for name in span.names)]

    def _make_room(self) -> None:
        while self.num_bytes > self.most_bytes:
            oldest = min(self._leaves(), key=lambda span: span.used)
            self.drop([oldest])

    def _add(self, span: Span) -> None:
        with self._lock:
            self._spans[span.key] = span
            for place, name in enumerate(span.names):
                self._by_name.setdefault(name, []).append((span, place))
            if span.tail(self.block_size):
                last = span.names[-1] if span.names else span.parent
                self._tails.setdefault(last, []).append(span)
