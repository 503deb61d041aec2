"""Builds a Hugging Face tokenizer from the vocabulary inside a GGUF.

How a text is cut before merging is not in the file, only its name (tokenizer.ggml.pre); the
expressions behind the names are those of each model's own tokenizer.json.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from localpaged.errors import ModelError

CONTROL, USER_DEFINED, BYTE = 3, 4, 6

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "llama-bpe": _LLAMA3, "tekken": _TEKKEN}
_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
_PLAIN = {"gpt-2", "default", "olmo"}


def build_tokenizer(fields: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a GGUF's metadata. tokenizer.json beside the file is taken instead if it is there.

    Raises ModelError for a vocabulary of a kind that is not supported.
    """
    beside = path.parent / "tokenizer.json"
    if beside.exists():
        return Tokenizer.from_file(str(beside))
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path} has no vocabulary. Put the model's tokenizer.json beside it.")
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{path} has a vocabulary of the kind {kind!r}, which is not supported. "
            "Put the model's tokenizer.json beside it."
        )
    try:
        tokenizer = _byte_level(fields, tokens, path) if kind == "gpt2" else _sentencepiece(fields, tokens)
    except ModelError:
        raise
    # The tokenizers package raises plain Exception for a vocabulary that does not hold together.
    except Exception as error:
        raise ModelError(f"{path} has a damaged vocabulary ({error}). Fetch the model again.") from error
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], normalized=False, special=True) for i, t in enumerate(types) if t == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(tokens[i], normalized=False) for i, t in enumerate(types) if t == USER_DEFINED])
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def _byte_level(fields: dict[str, Any], tokens: list[str], path: Path) -> Tokenizer:
    """Byte-level byte-pair encoding, as in GPT-2."""
    pre = fields.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in ("llama-bpe", "tekken")))
    if pre in _SPLITS:
        if "qwen" in pre:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif pre in _PLAIN:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        raise ModelError(
            f"{path} cuts text by the rule {pre!r}, which is not known here. Put the model's tokenizer.json beside it."
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's byte-pair encoding with byte fallback, as in Llama 2 and Mistral."""
    scores = fields["tokenizer.ggml.scores"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in vocabulary.items():
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[index], pair) for pair in known]
    merges.sort(key=lambda entry: -entry[0])
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer
