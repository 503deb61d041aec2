"""docs/api.md: which fields of the APIs' bodies do something, which are accepted, and which are refused by name."""

from typing import Any, get_args

from annotated_types import MaxLen
from pydantic import BaseModel

from localpaged.server import anthropic_schema, embeddings_api, ollama_schema, openai_schema, responses_schema
from localpaged.server.unsupported import Unsupported

INTRODUCTION = """# HTTP APIs

Every route is in `/openapi.json`. Errors have the shape of the API that they come from; the id of a request is in the
header `X-Request-ID` of its answer and in the log. A field that is not in these tables, has a wrong type or a value out
of range is a 400 that names it. *Accepted*: it changes nothing here, and real clients send it. *Refused*: known, not
supported, and a 400 unless it asks for nothing (null, false, 0, empty).

Tools work with every chat model. Where a template knows tools it writes them; elsewhere they are told in the system
prompt. Calls are read in the forms of Hermes, Qwen, SmolLM, Llama 3, Llama 4, Mistral, DeepSeek and Qwen3-Coder. With
`tool_choice` as `required` or a function's name, and for functions that are `strict`, a grammar sees to it that names
and arguments follow their schemas, in every choice; a strict function with `tool_choice` `auto` needs a model that
writes calls between tags, and is refused elsewhere. A required call gives `finish_reason` `tool_calls`, also where a
function is named. `usage.completion_tokens_details.choice_tokens` has the tokens of each choice.

`/v1/embeddings` gives the mean of the chat model's last hidden states, scaled to length 1. The model was not trained
for that: for search, an embedding model will do better.

`/v1/responses` keeps an answer as a turn of a conversation unless `store` is false; `previous_response_id` goes on from
it, twice from the same one is a branch, and the page shows both. `instructions` hold for one response.

With several users everything that is computed is shared among them: how soon an answer begins tells whether somebody
has sent the same beginning before.
"""
BODIES: list[tuple[str, type[BaseModel], tuple[str, ...]]] = [
    ("POST /v1/chat/completions", openai_schema.ChatBody, openai_schema.INERT),
    ("POST /v1/completions", openai_schema.CompletionBody, openai_schema.INERT),
    ("POST /v1/responses", responses_schema.ResponsesBody, responses_schema.INERT),
    ("POST /v1/embeddings", embeddings_api.EmbeddingsBody, ("user",)),
    ("POST /v1/messages", anthropic_schema.MessagesBody, anthropic_schema.INERT),
    ("POST /api/chat", ollama_schema.ChatBody, ollama_schema.INERT),
    ("POST /api/generate", ollama_schema.GenerateBody, ollama_schema.INERT),
    ("options of both", ollama_schema.Options, ollama_schema.INERT),
]


def api_fields() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, body, inert in BODIES:
        names = {name: field.alias or name for name, field in body.model_fields.items()}
        refused = [names[name] for name, field in body.model_fields.items() if name not in inert and _is_refused(field)]
        accepted = [shown for name, shown in names.items() if name in inert]
        if body is ollama_schema.Options:
            accepted, refused = list(inert), list(ollama_schema.NEUTRAL)
        taken = [shown for shown in names.values() if shown not in refused and shown not in accepted]
        rows = [("Taken", taken), ("Accepted", accepted), ("Refused", refused)]
        table = [f"| {kind} | {', '.join(f'`{name}`' for name in found)} |" for kind, found in rows if found]
        parts.append("\n".join([f"## {title}\n", "| | |", "|---|---|", *table]) + "\n")
    return "\n".join(parts)


def _is_refused(field: Any) -> bool:
    values = [value for part in get_args(field.annotation) or [field.annotation] for value in get_args(part) or [part]]
    return (
        any(mark in field.metadata for mark in get_args(Unsupported)[1:])
        or MaxLen(0) in field.metadata
        or all(value in (False, None, type(None)) for value in values)
    )
