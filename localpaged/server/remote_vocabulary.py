"""Numbers for tokens of which only the texts are told, so that reports of log-probabilities can name them."""


class RemoteVocabulary:
    """Grows with the tokens that were seen. The numbers are our own and mean nothing to the server."""

    def __init__(self) -> None:
        self._tokens: list[tuple[str, bytes]] = []
        self._numbers: dict[tuple[str, bytes], int] = {}

    def number(self, text: str, raw: list[int] | None = None) -> int:
        """A token's number. raw: its bytes, where the server tells them."""
        try:
            token = (text, text.encode(errors="replace") if raw is None else bytes(raw))
        except (TypeError, ValueError):
            token = (text, text.encode(errors="replace"))
        if token not in self._numbers:
            self._numbers[token] = len(self._tokens)
            self._tokens.append(token)
        return self._numbers[token]

    def token_text(self, token_id: int) -> str:
        return self._tokens[token_id][0]

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id][1]
