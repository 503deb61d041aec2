"""Whether a request can run at all, decided before anything does. Knows token ids and counts, no tensors."""

import secrets

from localpaged.engine.messages import Generate
from localpaged.engine.scheduler import Scheduler
from localpaged.engine.sequence import Request
from localpaged.errors import InvalidRequestError


def make_request(command: Generate, scheduler: Scheduler, eos_token_ids: frozenset[int], vocab_size: int) -> Request:
    """The request that a command asks for, its seed drawn and its length fitted to what there is room for.

    Raises InvalidRequestError and PromptTooLongError for what can never run.
    """
    params, prompt = command.params, command.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("The prompt is empty. Give at least one token.", "prompt")
    for name, token_ids in (
        ("prompt", prompt),
        ("logit_bias", params.logit_bias),
        ("stop_token_ids", params.stop_token_ids),
    ):
        bad = next((token_id for token_id in token_ids if not 0 <= token_id < vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(f"{name} has the token id {bad}; the model's are 0 to {vocab_size - 1}.", name)
    if params.beam_width is not None and params.stop:
        raise InvalidRequestError("Beam search takes stop_token_ids, not stop strings.", "stop")
    max_tokens = scheduler.fit_max_tokens(len(prompt), params.max_tokens, params.num_sequences)
    seed = params.seed if params.seed is not None else secrets.randbits(64)
    if command.lease_ids and (len(command.lease_ids) != params.n or command.conversation is None):
        raise InvalidRequestError(f"Leases need a conversation and one id for each of the {params.n} answers.", "n")
    # Ranked answers change places at the end, so none of them is kept.
    lease_ids = command.lease_ids if params.num_sequences == params.n and not params.needs_ranking else []
    return Request(
        command.request_id,
        prompt,
        params,
        seed,
        max_tokens,
        eos_token_ids,
        command.conversation,
        lease_ids,
        command.embeds,
    )
