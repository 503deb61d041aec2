"""What an import leaves out: counted by kind, so that nothing is dropped in silence."""

from collections import Counter

import msgspec


class Loss(msgspec.Struct, frozen=True):
    """Something of a kind that was not taken over, why, and how often."""

    what: str
    why: str
    count: int = 1


class Losses:
    """Grows while a file is read."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, what: str, why: str, count: int = 1) -> None:
        if count:
            self._counts[what, why] += count

    def merge(self, other: "Losses") -> None:
        self._counts += other._counts

    def all(self) -> list[Loss]:
        """In the order in which they were met."""
        return [Loss(what, why, count) for (what, why), count in self._counts.items()]
