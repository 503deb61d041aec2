"""The body of a request to an OpenAI-compatible server, and what that server was found not to take.

Fields beyond OpenAI's are named as in vLLM and sent only where they ask for something.
Sources: https://platform.openai.com/docs/api-reference/chat/create, vLLM's
entrypoints/openai/chat_completion/protocol.py.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from localpaged.engine.prompt import ChatPrompt, Prompt
from localpaged.engine.sampling_params import SamplingParams
from localpaged.engine.structured_outputs import StructuredOutputs
from localpaged.errors import FeatureAbsentError, InvalidRequestError

NEUTRAL = SamplingParams()
SENT_IF_SET = (
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
)
# Engine's own ways to choose among candidates, which no stream can carry.
ABSENT = ("best_of", "beam_width", "prompt_logprobs")


@dataclass
class Quirks:
    """What a server does not take. It is found out by its refusals, and the server is asked without from then on."""

    takes_n: bool = True
    takes_usage: bool = True
    takes_running_usage: bool = True
    limit_name: str = "max_tokens"

    def learn(self, refusal: InvalidRequestError) -> bool:
        """Note what a refusal is about; whether the request may be sent again without it."""
        text = f"{refusal.param} {refusal}"
        if self.takes_running_usage and "continuous_usage_stats" in text:
            self.takes_running_usage = False
        elif self.takes_usage and "stream_options" in text:
            self.takes_usage = self.takes_running_usage = False
        elif self.limit_name == "max_tokens" and "max_completion_tokens" in text and "support" in text:
            self.limit_name = "max_completion_tokens"
        else:
            return False
        return True


def path_of(prompt: Prompt) -> str:
    return "/chat/completions" if isinstance(prompt, ChatPrompt) else "/completions"


def check_params(params: SamplingParams) -> None:
    """Raises FeatureAbsentError for what no other server can be asked for."""
    for name in ABSENT:
        if getattr(params, name) is not None:
            told = "best_of and beam search" if name != "prompt_logprobs" else name
            raise FeatureAbsentError(f"{told} cannot be had of another server: leave it out.", name)


def body_of(prompt: Prompt, params: SamplingParams, model: str, indexes: list[int], quirks: Quirks) -> dict[str, Any]:
    """Ask for these candidates of a request in one."""
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    is_chat = isinstance(prompt, ChatPrompt)
    if isinstance(prompt, ChatPrompt):
        body["messages"] = prompt.messages
        if prompt.begun:
            body["messages"] = [*prompt.messages, {"role": "assistant", "content": prompt.begun}]
            body |= {"continue_final_message": True, "add_generation_prompt": False}
    else:
        body["prompt"] = prompt
    if len(indexes) > 1:
        body["n"] = len(indexes)
    # Left out, plain completions would end after 16 tokens; null is up to the window.
    if params.max_tokens is not None or not is_chat:
        body[quirks.limit_name if is_chat else "max_tokens"] = params.max_tokens
    if params.seed is not None:
        body["seed"] = params.seed if len(indexes) > 1 else seed_of(params.seed, indexes[0])
    for name in SENT_IF_SET:
        if getattr(params, name) != getattr(NEUTRAL, name):
            body[name] = getattr(params, name)
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": params.logprobs} if is_chat else {"logprobs": params.logprobs}
    if params.structured_outputs is not None:
        body |= _structured(params.structured_outputs, is_chat)
    if quirks.takes_usage:
        body["stream_options"] = {"include_usage": True}
        if quirks.takes_running_usage:
            body["stream_options"]["continuous_usage_stats"] = True
    return body


def seed_of(seed: int, index: int) -> int:
    """The seed of one candidate asked for alone: the first has the request's, so that one answer is always the same."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _structured(wanted: StructuredOutputs, is_chat: bool) -> dict[str, Any]:
    """OpenAI's field where it has one, vLLM's for the rest."""
    if is_chat and wanted.json is not None:
        schema = {"name": "answer", "schema": wanted.json, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if is_chat and wanted.json_object:
        return {"response_format": {"type": "json_object"}}
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    return {"structured_outputs": {kind: getattr(wanted, kind) for kind in kinds if getattr(wanted, kind)}}
