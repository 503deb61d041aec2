"""Text to token ids and back, and a conversation to the text that the model was trained on."""

import json
from pathlib import Path
from typing import Any

from localpaged.errors import InvalidRequestError, ModelError
from localpaged.models.gguf_header import GgufHeader, read_header
from localpaged.models.tool_prompt import with_tools_as_text


def _byte_by_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_BY_CHARACTER = _byte_by_character()


class ChatTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], path: Path) -> None:
        """tokenizer: a transformers PreTrainedTokenizerFast."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.eos_token_ids = eos_token_ids
        self.path = path
        self._added_ids = set(self._backend.get_added_tokens_decoder())
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(self._backend.to_str())["decoder"])

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def knows_tools(self) -> bool:
        """Whether the template writes tools; where it does not, they are written as tool_prompt.py does."""
        return "tools" in str(self._tokenizer.chat_template)

    @property
    def tags_tool_calls(self) -> bool:
        """Whether a call is a JSON object between <tool_call> and </tool_call>."""
        template = str(self._tokenizer.chat_template)
        return not self.knows_tools or ("<tool_call>" in template and "<function=" not in template)

    @property
    def thinks_on_demand(self) -> bool:
        """Whether the template can be told to let the model think, or not to."""
        return "enable_thinking" in str(self._tokenizer.chat_template)

    @property
    def knows_thinking(self) -> bool:
        """Whether the template has a place for what the model thinks."""
        return "<think>" in str(self._tokenizer.chat_template)

    def guidance_tokens(self, vocab_size: int, eos_token_ids: list[int]) -> Any:
        """The vocabulary as llguidance takes it, with vocab_size tokens as the model's logits have."""
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens in it count as such, nothing is put before it."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a prompt that no template has wrapped, begun as the model expects."""
        return self._backend.encode(text, add_special_tokens=True).ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token as text, special ones by name; for reports, not for joining."""
        return self._backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, be they whole characters or not; a special one's name."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return str(token).encode()
        if self._is_byte_level:
            return bytes(_BYTE_BY_CHARACTER[character] for character in token)
        if len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("▁", " ").encode()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        think: bool | None = None,
    ) -> str:
        """The messages (role, content) as the template writes them, up to where the answer begins.

        tools: as OpenAI's API has them; assistant messages may have tool_calls, whose arguments are an object.
        think: whether the model is to think before it answers; None leaves that to the template.
        Raises InvalidRequestError when the template refuses them.
        """
        if not self.has_chat_template:
            raise ModelError(
                f"{self.path.name} has no chat template: it is not a chat model. "
                "Use /v1/completions or LLM.generate, or choose an instruct model."
            )
        from jinja2 import TemplateError

        if not self.knows_tools:
            messages, tools = with_tools_as_text(messages, tools), None
        if think and not self.knows_thinking:
            raise InvalidRequestError("This model does not think before it answers. Leave think out.", "think")
        switch = {"enable_thinking": think} if think is not None and self.thinks_on_demand else {}
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **switch
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidRequestError(
                f"The model's chat template does not take these messages: {error}", "messages"
            ) from error


def load_tokenizer(path: Path) -> ChatTokenizer:
    """The tokenizer of a GGUF file or a transformers folder. Raises ModelError."""
    if path.is_file():
        return _from_gguf(path, read_header(path))
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").exists() and not (path / "tokenizer.model").exists():
        raise ModelError(f"{path} has no tokenizer.json. Fetch the model again: localpaged pull NAME.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, use_fast=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"The tokenizer in {path} cannot be read: {error}") from error
    return ChatTokenizer(tokenizer, folder_eos_token_ids(path), path)


def _from_gguf(path: Path, header: GgufHeader) -> ChatTokenizer:
    from transformers import PreTrainedTokenizerFast

    metadata = header.metadata
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {name: metadata[f"{kind}_token"] for kind, name in names.items() if metadata.get(f"{kind}_token")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(header.folder / "tokenizer.json"), **special)
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return ChatTokenizer(tokenizer, frozenset({*metadata["end_of_turn_ids"], *([] if eos is None else [eos])}), path)


def folder_eos_token_ids(folder: Path) -> frozenset[int]:
    """The ids that end an answer, from generation_config.json and config.json."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.exists():
            eos = json.loads(file.read_text()).get("eos_token_id")
            found |= {eos} if isinstance(eos, int) else set(eos or [])
    return frozenset(found)
