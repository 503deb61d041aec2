"""What an engine can tell or do beyond answering, so that the page and the APIs show what is absent as absent."""

import msgspec


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """kv: a pool of blocks that can be looked into, priced and pinned. token_count: a tokenizer, so that prompts are
    counted before they are sent. continue_answer: an answer that was cut off can go on where it ends.
    """

    kv: bool = True
    token_count: bool = True
    continue_answer: bool = True
