"""Spans on disk, one file each.

A file is written beside its name and renamed, and carries a checksum: one that was cut off, changed, or written by
another version is dropped, and what it held is computed again.
"""

import json
import logging
import os
import shutil
import time
import zlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from localpaged.engine.kv_spans import KV, ArrivingKV, KvReadError, Span, SpanStore

logger = logging.getLogger(__name__)

# Of the files' layout; files of another are in a folder of another name.
VERSION = "2"
SUFFIX = ".safetensors"
RETRY_S = 60.0
# Until something was read; a slow disk.
FIRST_READ_BYTES_S = 500e6


class KvFiles(SpanStore):
    """The spans of one model in folder/fingerprint."""

    def __init__(self, folder: Path, fingerprint: str, block_size: int, most_bytes: int) -> None:
        super().__init__(block_size, most_bytes, FIRST_READ_BYTES_S)
        self.folder = folder / f"{fingerprint}-{VERSION}"
        self._refused_until = 0.0
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.suffix != SUFFIX:
                path.unlink(missing_ok=True)  # What a killed process had not finished.
                continue
            try:
                self._add(self._describe(path))
            except (KvReadError, SafetensorError, OSError, ValueError, KeyError) as error:
                logger.warning("KV file %s is dropped: %s", path.name, error)
                path.unlink(missing_ok=True)
        self._trim_others(folder)

    def path_of(self, span: Span) -> Path:
        return self.folder / f"{span.key}{SUFFIX}"

    def read(self, span: Span, first: int, end: int) -> KV:
        path = self.path_of(span)
        try:
            with safe_open(path, framework="np") as file:
                metadata, kv = file.metadata() or {}, file.get_tensor("kv")
            if metadata.get("checksum") != _checksum(kv):
                raise KvReadError("its checksum differs")
            os.utime(path)
        except (OSError, SafetensorError, KvReadError) as error:
            logger.warning("KV file %s is dropped: %s", path.name, error)
            self.drop([span])
            raise KvReadError(str(error)) from error
        span.used = time.time()
        result: KV = kv[first:end]
        return result

    def _put(self, span: Span, kv: KV | ArrivingKV) -> bool:
        """A disk that is full is tried again after a minute; nothing but time is lost by it."""
        if time.monotonic() < self._refused_until:
            return False
        kv = np.asarray(kv)
        metadata = {
            "parent": span.parent.hex(),
            "token_ids": json.dumps(span.token_ids),
            "names": "".join(name.hex() for name in span.names),
            "checksum": _checksum(kv),
            "conversation": span.conversation,
            "lease": span.lease_id,
        }
        path = self.path_of(span)
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            save_file({"kv": kv}, partial, metadata)
            os.replace(partial, path)
            span.num_bytes = path.stat().st_size
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            self._refused_until = time.monotonic() + RETRY_S
            logger.warning("KV is not stored for the next %d s: %s", RETRY_S, error)
            return False
        return True

    def _delete(self, span: Span) -> None:
        self.path_of(span).unlink(missing_ok=True)

    def _describe(self, path: Path) -> Span:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        token_ids, joined = json.loads(metadata["token_ids"]), bytes.fromhex(metadata["names"])
        names = [joined[i : i + 16] for i in range(0, len(joined), 16)]
        if len(names) != len(token_ids) // self.block_size:
            raise KvReadError("its blocks are of another size")
        stat = path.stat()
        return Span(
            path.stem,
            bytes.fromhex(metadata["parent"]),
            token_ids,
            names,
            stat.st_size,
            metadata["conversation"],
            metadata["lease"],
            stat.st_mtime,
        )

    def _trim_others(self, folder: Path) -> None:
        """Delete what other models have here, the least recently used first, as far as all together are too much."""
        others = [path for path in folder.iterdir() if path.is_dir() and path != self.folder]
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in others}
        for path in sorted(others, key=lambda path: path.stat().st_mtime):
            if self.num_bytes + sum(sizes.values()) <= self.most_bytes:
                return
            shutil.rmtree(path, ignore_errors=True)
            del sizes[path]


def _checksum(kv: KV) -> str:
    """Against damage, not against forgery: four times as fast as a cryptographic hash, which took half of reading."""
    return f"{zlib.crc32(np.ascontiguousarray(kv).view(np.uint8).data):08x}"
