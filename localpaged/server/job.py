"""One running generation and its event log, which any number of browsers follow from any place.

Knows the engine's events and the stored messages; nothing of the store's file or of HTTP.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from localpaged.engine.messages import Admitted, Delta, Event, Finished, Prefilled
from localpaged.store.message import Message, Timings

JobEvent = dict[str, Any]
PACE_S = 1 / 15


class Candidate:
    """One answer while it is written: its message, and what the log does not have yet."""

    def __init__(self, message: Message, index: int) -> None:
        self.message = message
        self.index = index
        # An answer that goes on counts what it has; its speed is that of the new tokens.
        # Of one without token ids it is what was counted then, if it was.
        counted = message.timings.num_tokens if message.timings is not None else 0
        self.num_before = len(message.token_ids) if message.token_ids else counted
        self.message.timings = Timings(num_tokens=self.num_before)
        self.unsent_text = ""
        self.changed = False
        self.first_token_at: float | None = None
        self.last_token_at = 0.0
        # What came at first_token_at; the speed is that of what came after it.
        self.num_first = 1

    @property
    def running(self) -> bool:
        return self.message.state == "running"

    @property
    def timings(self) -> Timings:
        assert self.message.timings is not None
        return self.message.timings

    def gain(self, delta: Delta, begun_at: float) -> None:
        """Take what the engine produced."""
        if not self.running:
            return
        now = time.monotonic()
        self.message.text += delta.text
        self.message.token_ids += delta.token_ids
        self.unsent_text += delta.text
        self.changed = True
        timings = self.timings
        timings.num_shared_blocks = delta.num_shared_blocks or timings.num_shared_blocks
        timings.num_own_blocks = delta.num_own_blocks or timings.num_own_blocks
        if delta.token_ids:
            timings.num_tokens = (timings.num_tokens or 0) + len(delta.token_ids)
        elif delta.num_tokens is not None and self.num_before is not None:
            timings.num_tokens = self.num_before + delta.num_tokens
        elif delta.text and self.first_token_at is None:
            timings.num_tokens = None
        if delta.token_ids or delta.text:
            self.last_token_at = now
            if self.first_token_at is None:
                self.first_token_at = now
                self.num_first = max((timings.num_tokens or 0) - (self.num_before or 0), 1)
                timings.ttft_s = now - begun_at
        if timings.num_tokens is not None and self.first_token_at is not None:
            elapsed = self.last_token_at - self.first_token_at
            num_new = timings.num_tokens - (self.num_before or 0)
            if num_new > self.num_first and elapsed > 0:
                timings.tokens_per_s = (num_new - self.num_first) / elapsed
        if delta.finish_reason == "error":
            self.end("error", error="The model failed on this answer. Regenerate it.")
        elif delta.finish_reason is not None:
            self.end("complete", finish_reason=delta.finish_reason)

    def end(self, state: Any, finish_reason: str | None = None, error: str | None = None) -> None:
        """Leave the running state, once."""
        if self.running:
            self.message.state = state
            self.message.finish_reason = finish_reason
            self.message.error = error
            self.changed = True

    def progress(self) -> JobEvent:
        """What the log gets: the new text, and figures that replace the earlier ones."""
        timings = self.timings
        event: JobEvent = {
            "i": self.index,
            "text": self.unsent_text,
            "state": self.message.state,
            "tokens": timings.num_tokens,
            "tps": timings.tokens_per_s and round(timings.tokens_per_s, 2),
            "ttft": timings.ttft_s and round(timings.ttft_s, 4),
            "shared": timings.num_shared_blocks,
            "own": timings.num_own_blocks,
        }
        if not self.running:
            event |= {"finish": self.message.finish_reason, "error": self.message.error}
        self.unsent_text = ""
        self.changed = False
        return event


class Job:
    """The answers to one user message, being written; goes_on: the only one had begun before.

    system_prompt: in place of the conversation's, unless None.

    phase: "queued", "loading" (the model), "prefill", "decoding", "done". The log only grows; an
    event's id is its place in it.
    """

    def __init__(
        self,
        job_id: str,
        user: Message,
        candidates: list[Message],
        goes_on: bool = False,
        system_prompt: str | None = None,
    ) -> None:
        self.id = job_id
        self.user = user
        self.candidates = [Candidate(message, index) for index, message in enumerate(candidates)]
        self.goes_on = goes_on
        self.system_prompt = system_prompt
        self.log: list[JobEvent] = []
        self.phase = "queued"
        self.prefill: JobEvent = {"computed": 0, "total": 0, "cached": 0}
        self.error: JobEvent | None = None
        self.submitted = False
        self.done = asyncio.Event()
        self._begun_at = time.monotonic()
        self._logged_at = 0.0
        self._grown = asyncio.Event()

    @property
    def conversation_id(self) -> int:
        return self.user.conversation

    def begin(self) -> None:
        """The request goes to the engine: times count from here."""
        self._begun_at = time.monotonic()
        self.submitted = True

    def set_phase(self, phase: str) -> None:
        if phase != self.phase:
            self.phase = phase
            self.append({"type": "phase", "phase": phase})

    def take(self, event: Event) -> None:
        """Apply an event of the engine, other than its last."""
        if isinstance(event, Admitted):
            self.prefill = {
                "computed": event.num_cached_tokens,
                "total": event.num_prompt_tokens,
                "cached": event.num_cached_tokens,
            }
            self._set_prompt(event.num_prompt_tokens, event.num_cached_tokens)
            self.set_phase("prefill")
            self.append({"type": "prefill", **self.prefill})
        elif isinstance(event, Prefilled):
            self.prefill["computed"] = event.num_computed_tokens
            self.append({"type": "prefill", **self.prefill})
        elif isinstance(event, Delta) and event.index < len(self.candidates):
            self.set_phase("decoding")
            self.candidates[event.index].gain(event, self._begun_at)
            if time.monotonic() - self._logged_at >= PACE_S:
                self.log_progress()

    def finish(self, event: Finished) -> None:
        """Take the engine's last event: some know only then what the prompt took."""
        if any(candidate.timings.num_cached_tokens is None for candidate in self.candidates):
            self._set_prompt(event.num_prompt_tokens, event.num_cached_tokens)

    def _set_prompt(self, num_tokens: int | None, num_cached: int | None) -> None:
        for candidate in self.candidates:
            candidate.timings.num_cached_tokens = num_cached
            if num_tokens is not None and num_cached is not None:
                candidate.timings.num_computed_tokens = num_tokens - num_cached

    def log_progress(self) -> None:
        """Put what has gathered since the last time into the log, as one event."""
        changed = [candidate for candidate in self.candidates if candidate.changed]
        if changed:
            self._logged_at = time.monotonic()
            self.append({"type": "tokens", "candidates": [candidate.progress() for candidate in changed]})

    def append(self, event: JobEvent) -> None:
        self.log.append(event)
        self._grown.set()
        self._grown = asyncio.Event()

    def snapshot(self) -> JobEvent:
        """Everything the log adds up to, for a browser that comes in the middle."""
        self.log_progress()
        return {
            "type": "snapshot",
            "job": self.id,
            "conversation": self.conversation_id,
            "user": self.user.id,
            "phase": self.phase,
            "prefill": dict(self.prefill),
            "error": self.error,
            "candidates": [
                {**candidate.progress(), "id": candidate.message.id, "text": candidate.message.text}
                for candidate in self.candidates
            ],
        }

    async def follow(
        self, cursor: int | None = None, heartbeat_s: float = 15.0
    ) -> AsyncIterator[tuple[int, JobEvent | None]]:
        """Yield (cursor, event) from a place in the log, or from now behind a snapshot, to the end.

        None in place of an event is a heartbeat.
        """
        if cursor is None or not 0 <= cursor <= len(self.log):
            snapshot = self.snapshot()
            cursor = len(self.log)
            yield cursor, snapshot
        while True:
            while cursor < len(self.log):
                cursor += 1
                yield cursor, self.log[cursor - 1]
            if self.done.is_set():
                return
            try:
                await asyncio.wait_for(self._grown.wait(), heartbeat_s)
            except TimeoutError:
                yield cursor, None
