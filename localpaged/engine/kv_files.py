"""KV on disk: spans of blocks as files, found by the tokens that they hold.

A span is a run of blocks that follows the blocks of another span, or nothing; so what several branches have in
common is stored once. Each block is named by a hash over all tokens up to its end, and a hit compares the tokens
themselves. A file is written beside its name and renamed, and carries a checksum: one that was cut off, changed, or
written by another version is dropped and computed again.
Knows token ids, arrays and files; nothing of pools, tensors or models.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

logger = logging.getLogger(__name__)

# Of the files' layout; files of another are in a folder of another name.
VERSION = "1"
ROOT = b""
SUFFIX = ".safetensors"
RETRY_S = 60.0


class KvFileError(Exception):
    """A file is not what it was when it was written."""


@dataclass(slots=True, eq=False)
class Span:
    """A file: token_ids fill its blocks one after the other, the last one perhaps in part.

    parent: name of the block before the first; names: of its full blocks; used: seconds since 1970
    """

    path: Path
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
class Found:
    """The first num_tokens tokens of a text are in these blocks [first, end) of spans, one after the other."""

    num_tokens: int = 0
    parts: list[tuple[Span, int, int]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span, _, _ in self.parts)

    def add(self, span: Span, place: int, num_tokens: int) -> None:
        """Go on with the block at a place of a span, of which num_tokens tokens are wanted."""
        if self.parts and self.parts[-1][0] is span and self.parts[-1][2] == place:
            self.parts[-1] = (span, self.parts[-1][1], place + 1)
        else:
            self.parts.append((span, place, place + 1))
        self.num_tokens += num_tokens


def block_names(token_ids: list[int], block_size: int) -> list[bytes]:
    """The name of each full block: a hash over every token up to its end."""
    names, name = [], ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = np.asarray(token_ids[start : start + block_size], dtype=np.int64)
        name = hashlib.blake2b(name + block.tobytes(), digest_size=16).digest()
        names.append(name)
    return names


class KvFiles:
    """The files of one model in folder/fingerprint, at most most_bytes of them. Any thread may call it."""

    def __init__(self, folder: Path, fingerprint: str, block_size: int, most_bytes: int) -> None:
        self.folder = folder / f"{fingerprint}-{VERSION}"
        self.block_size = block_size
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._spans: dict[Path, Span] = {}
        self._by_name: dict[bytes, tuple[Span, int]] = {}
        self._tails: dict[bytes, list[Span]] = {}
        self._refused_until = 0.0
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.suffix != SUFFIX:
                path.unlink(missing_ok=True)  # What a killed process had not finished.
                continue
            try:
                self._add(self._describe(path))
            except (KvFileError, SafetensorError, OSError, ValueError, KeyError) as error:
                logger.warning("KV file %s is dropped: %s", path.name, error)
                path.unlink(missing_ok=True)
        self._trim_others(folder)

    def _trim_others(self, folder: Path) -> None:
        """Delete what other models have here, the least recently used first, as far as all together are too much."""
        others = [path for path in folder.iterdir() if path.is_dir() and path != self.folder]
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in others}
        for path in sorted(others, key=lambda path: path.stat().st_mtime):
            if self.num_bytes + sum(sizes.values()) <= self.most_bytes:
                return
            shutil.rmtree(path, ignore_errors=True)
            del sizes[path]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(span.num_bytes for span in list(self._spans.values()))

    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans.values())

    def find(self, token_ids: list[int]) -> Found:
        """The longest beginning of a text that is on disk."""
        found, size, parent = Found(), self.block_size, ROOT
        with self._lock:
            for name in block_names(token_ids, size):
                if name not in self._by_name:
                    break
                span, place = self._by_name[name]
                wanted = token_ids[found.num_tokens : found.num_tokens + size]
                if span.token_ids[place * size : (place + 1) * size] != wanted:
                    break
                found.add(span, place, size)
                parent = name
            rest = token_ids[found.num_tokens : found.num_tokens + size]
            tails = [(len(commonprefix([one.tail(size), rest])), one) for one in self._tails.get(parent, [])]
            num_common, longest = max(tails, key=lambda tail: tail[0], default=(0, None))
            if longest is not None and num_common:
                found.add(longest, len(longest.names), num_common)
        return found

    def num_stored(self, token_ids: list[int]) -> int:
        """How many of the tokens need no new file: full blocks, or all of them."""
        num_found = self.find(token_ids).num_tokens
        return num_found if num_found == len(token_ids) else num_found // self.block_size * self.block_size

    def write(
        self, kv: NDArray[np.float32], token_ids: list[int], num_before: int, conversation: str, lease_id: str
    ) -> bool:
        """Store the blocks of token_ids[num_before:], num_before whole blocks in; whether that was done.

        kv: [blocks, ...]. A disk that is full is tried again after a minute; nothing but time is lost by it.
        """
        if time.monotonic() < self._refused_until:
            return False
        names = block_names(token_ids, self.block_size)
        first = num_before // self.block_size
        parent = names[first - 1] if first else ROOT
        own = token_ids[num_before:]
        last = hashlib.blake2b(parent + np.asarray(own, dtype=np.int64).tobytes(), digest_size=16).hexdigest()
        path = self.folder / f"{last}{SUFFIX}"
        if path in self._spans:
            return True
        metadata = {
            "parent": parent.hex(),
            "token_ids": json.dumps(own),
            "names": "".join(name.hex() for name in names[first:]),
            "checksum": _checksum(kv),
            "conversation": conversation,
            "lease": lease_id,
        }
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            save_file({"kv": kv}, partial, metadata)
            os.replace(partial, path)
            span = self._describe(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            self._refused_until = time.monotonic() + RETRY_S
            logger.warning("KV is not stored for the next %d s: %s", RETRY_S, error)
            return False
        self._add(span)
        self._make_room()
        return True

    def read(self, span: Span, first: int, end: int) -> NDArray[np.float32]:
        """Blocks [first, end) of a span. Raises KvFileError, and drops the file, when it does not verify."""
        try:
            with safe_open(span.path, framework="np") as file:
                metadata, kv = file.metadata() or {}, file.get_tensor("kv")
            if metadata.get("checksum") != _checksum(kv):
                raise KvFileError("its checksum differs")
            os.utime(span.path)
        except (OSError, SafetensorError, KvFileError) as error:
            logger.warning("KV file %s is dropped: %s", span.path.name, error)
            self.drop([span])
            raise KvFileError(str(error)) from error
        span.used = time.time()
        result: NDArray[np.float32] = kv[first:end]
        return result

    def drop(self, spans: Iterable[Span]) -> None:
        """Delete files, and with each those that follow it, which cannot be used without it."""
        with self._lock:
            waiting = list(spans)
            while waiting:
                span = waiting.pop()
                if self._spans.pop(span.path, None) is None:
                    continue
                span.path.unlink(missing_ok=True)
                for name in span.names:
                    if self._by_name.get(name, (None,))[0] is span:
                        del self._by_name[name]
                for tails in self._tails.values():
                    if span in tails:
                        tails.remove(span)
                waiting += [other for other in self._spans.values() if other.parent in span.names]

    def drop_conversation(self, conversation: str | None) -> None:
        """Delete what a conversation alone needs, or everything."""
        self._drop_leaves(lambda span: conversation is None or span.conversation == conversation)

    def drop_leases(self, lease_ids: Iterable[str]) -> None:
        """Delete what these answers alone need."""
        names = set(lease_ids)
        self._drop_leaves(lambda span: span.lease_id in names)

    def _drop_leaves(self, wanted: Callable[[Span], bool]) -> None:
        while leaves := [span for span in self._leaves() if wanted(span)]:
            self.drop(leaves)

    def _leaves(self) -> list[Span]:
        spans = self.spans()
        parents = {span.parent for span in spans}
        return [span for span in spans if not any(name in parents for name in span.names)]

    def _make_room(self) -> None:
        while self.num_bytes > self.most_bytes:
            oldest = min(self._leaves(), key=lambda span: span.used)
            self.drop([oldest])

    def _describe(self, path: Path) -> Span:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        token_ids, joined = json.loads(metadata["token_ids"]), bytes.fromhex(metadata["names"])
        names = [joined[i : i + 16] for i in range(0, len(joined), 16)]
        if len(names) != len(token_ids) // self.block_size:
            raise KvFileError("its blocks are of another size")
        stat = path.stat()
        return Span(
            path,
            bytes.fromhex(metadata["parent"]),
            token_ids,
            names,
            stat.st_size,
            metadata["conversation"],
            metadata["lease"],
            stat.st_mtime,
        )

    def _add(self, span: Span) -> None:
        with self._lock:
            self._spans[span.path] = span
            # Of two spans with the same beginning, written at once, the later one is found: it may outlive the other.
            self._by_name |= {name: (span, place) for place, name in enumerate(span.names)}
            if span.tail(self.block_size):
                last = span.names[-1] if span.names else span.parent
                self._tails.setdefault(last, []).append(span)


def _checksum(kv: NDArray[np.float32]) -> str:
    return hashlib.blake2b(np.ascontiguousarray(kv).view(np.uint8).data, digest_size=16).hexdigest()
