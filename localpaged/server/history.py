"""The token ids of a prompt, built so that nothing already computed is written differently.

A conversation's past is its stored token ids, exactly as the model saw and produced them. The chat
template is rendered over the whole branch and compared with what those ids decode to: as long as
they agree the ids are kept, and only the rest is encoded. Knows nothing of the engine or the store's file.
"""

import os.path
from typing import Any, NamedTuple, Protocol

from localpaged.store.message import Message

# Of one character in UTF-8, and so the most tokens that it takes.
MOST_BYTES = 4


class Tokenizer(Protocol):
    """What this needs of localpaged.models.chat_tokenizer.ChatTokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, /) -> list[int]: ...

    def decode(self, token_ids: list[int], /, skip_special_tokens: bool = False) -> str: ...

    def render_chat(self, messages: list[dict[str, Any]], /, add_generation_prompt: bool = True) -> str: ...


class Prompt(NamedTuple):
    """A prompt's ids, of which the first num_kept are the branch's stored ones."""

    token_ids: list[int]
    num_kept: int


def branch_token_ids(path: list[Message]) -> list[int]:
    """The ids that the messages from the root onwards add up to."""
    token_ids: list[int] = []
    for message in path:
        if message.num_kept_tokens is not None:
            del token_ids[message.num_kept_tokens :]
        token_ids += message.token_ids
    return token_ids


def chat_messages(system_prompt: str, path: list[Message]) -> list[dict[str, Any]]:
    """A path as chat templates and other servers know it."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt.strip() else []
    return [*system, *({"role": message.role, "content": message.text} for message in path)]


def build_prompt(tokenizer: Tokenizer, system_prompt: str, path: list[Message]) -> Prompt:
    """The prompt that asks for an answer to the last message of a path."""
    rendered = tokenizer.render_chat(chat_messages(system_prompt, path), add_generation_prompt=True)
    stored = _known(tokenizer, branch_token_ids(path))
    num_kept = _num_agreeing(tokenizer, stored, rendered)
    kept = stored[:num_kept]
    token_ids = kept + tokenizer.encode(rendered[len(tokenizer.decode(kept)) :])
    if tokenizer.decode(token_ids) == rendered:
        return Prompt(token_ids, num_kept)
    # A tokenizer that encodes a text differently in two pieces: take the whole, keep what is equal.
    token_ids = tokenizer.encode(rendered)
    return Prompt(token_ids, len(os.path.commonprefix([stored, token_ids])))


def record_span(user: Message, before: list[Message], prompt: Prompt) -> None:
    """Write into a user message the span that it adds to the ids of the messages before it."""
    user.num_kept_tokens = min(prompt.num_kept, len(branch_token_ids(before)))
    user.token_ids = prompt.token_ids[user.num_kept_tokens :]


def beginning_of(tokenizer: Tokenizer, answer: Message) -> tuple[list[int], str]:
    """The ids and the text with which an answer that was cut off goes on; the text is what it was, at least."""
    ids = answer.token_ids if _known(tokenizer, answer.token_ids) == answer.token_ids else []
    for end in range(len(ids), max(len(ids) - MOST_BYTES, 0), -1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        # Half a character at the end is written anew.
        if text.endswith("\ufffd") and not answer.text.endswith("\ufffd"):
            continue
        if text.startswith(answer.text):
            return ids[:end], text
        break
    # Another model's ids, or none.
    return tokenizer.encode(answer.text), answer.text


def _known(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    """The ids before the first that the model has no token for: another model's, or of an imported file.

    Such an id decodes to nothing, so that it would agree with any text.
    """
    if not token_ids or max(token_ids) < tokenizer.vocab_size:
        return token_ids
    return token_ids[: next(place for place, one in enumerate(token_ids) if one >= tokenizer.vocab_size)]


def _num_agreeing(tokenizer: Tokenizer, stored: list[int], rendered: str) -> int:
    """How many of the stored ids decode to a beginning of the rendered text."""
    decoded = tokenizer.decode(stored)
    if rendered.startswith(decoded):
        return len(stored)
    num_equal_chars = len(os.path.commonprefix([decoded, rendered]))
    low, high = 0, len(stored)
    while low < high:
        middle = (low + high + 1) // 2
        # Half a character at the end decodes to U+FFFD, which says nothing about where we are.
        if len(tokenizer.decode(stored[:middle]).rstrip("\ufffd")) <= num_equal_chars:
            low = middle
        else:
            high = middle - 1
    while low and not rendered.startswith(tokenizer.decode(stored[:low])):
        low -= 1
    # The token before the cut may join with what follows: one back lets the encoder decide.
    return max(low - 1, 0)
