"""Spans in the computer's memory, beside the pool: for what the pool has no room for."""

import time

import numpy as np

from localpaged.engine.kv_spans import KV, ArrivingKV, KvReadError, Span, SpanStore

# Until something was read; one core's copy.
FIRST_READ_BYTES_S = 5e9


class KvHost(SpanStore):
    """Spans of one pool that last as long as the process."""

    def __init__(self, block_size: int, most_bytes: int) -> None:
        super().__init__(block_size, most_bytes, FIRST_READ_BYTES_S)
        self._kv: dict[str, KV | ArrivingKV] = {}

    def read(self, span: Span, first: int, end: int) -> KV:
        kv = self._kv.get(span.key)
        if kv is None:
            raise KvReadError("it was dropped meanwhile")
        span.used = time.time()
        blocks: KV = np.asarray(kv)[first:end]
        return blocks

    def _put(self, span: Span, kv: KV | ArrivingKV) -> bool:
        self._kv[span.key] = kv
        return True

    def _delete(self, span: Span) -> None:
        self._kv.pop(span.key, None)
