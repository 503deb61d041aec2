"""Token ids to text as they come: whole characters only, and never a part of a stop string.

Knows a decode function and strings; nothing of models or requests.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# A character of UTF-8 has four bytes at most, so one that is not whole yet began at most three tokens ago.
LONGEST_BEGINNING = 3

Decode = Callable[[list[int]], str]


class Detokenizer:
    """The text of one growing answer. decode turns token ids to text, broken characters to U+FFFD.

    before: tokens that the answer goes on from, whose text is not part of it.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), include_stop: bool = False, before: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._token_ids: list[int] = list(before)
        # Tokens before _read are in the text. Those from _context on give the next ones their
        # surroundings, since how a token reads can depend on the one before it.
        self._context = 0
        self._read = len(self._token_ids)
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int, check_stop: bool = True) -> str:
        """Add one token; the text that is final by it. matched_stop is set when a stop string ended it."""
        self._token_ids.append(token_id)
        return self._release(self._new_text(), check_stop)

    def finish(self) -> str:
        """The text held back; a character that never became whole is left out."""
        text = self._tail().rstrip(REPLACEMENT)
        self._read = self._context = len(self._token_ids)
        held, self._held = self._held, ""
        return "" if self.matched_stop is not None else held + text

    def _tail(self) -> str:
        before = self._decode(self._token_ids[self._context : self._read])
        return self._decode(self._token_ids[self._context :])[len(before) :]

    def _new_text(self) -> str:
        text = self._tail()
        if not text:
            return ""
        if not text.endswith(REPLACEMENT):
            self._context, self._read = self._read, len(self._token_ids)
            return text
        settled = len(self._token_ids) - LONGEST_BEGINNING
        if settled <= self._read:
            return ""
        # Still broken: what stands before the last few tokens will never become a character.
        before = self._decode(self._token_ids[self._context : self._read])
        self._read = settled
        return self._decode(self._token_ids[self._context : settled])[len(before) :]

    def _release(self, text: str, check_stop: bool) -> str:
        if self.matched_stop is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        if check_stop:
            found = [(position, stop) for stop in self._stop if (position := text.find(stop)) >= 0]
            if found:
                # The earliest; of several that begin there, the longest.
                position, stop = min(found, key=lambda match: (match[0], -len(match[1])))
                self.matched_stop, self._held = stop, ""
                return text[: position + len(stop)] if self._include_stop else text[:position]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text could begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
