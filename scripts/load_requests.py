"""What the crowd of a load test asks with, and what a server must refuse, with the status for it."""

import json
from typing import Any

WORDS = ["tide", "lamp", "harbour", "gull", "keeper", "fog", "bell", "rope", "anchor", "wave", "salt", "cliff"]
SYSTEM = "You answer in a few plain words. " * 6
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["blue", "green"]}}, "required": ["colour"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": COLOUR}}
JSON_HEADERS = {"Content-Type": "application/json"}


def bad_requests(model: str) -> list[tuple[str, str, bytes, int]]:
    """(method, path, body, status)."""
    chat: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    fields: list[dict[str, Any]] = [
        {"n": 0},
        {"n": 100_000},
        {"n": "two"},
        {"temperature": -1},
        {"temperature": 1e308},
        {"max_tokens": -4},
        {"top_p": 7},
        {"stop": [""]},
        {"seed": 1.5},
        {"logit_bias": {"x": 1}},
        {"unknown_field": 1},
        {"messages": []},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": "tide " * 40_000}]},
        {"structured_outputs": {"regex": "("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "no"}}}},
        {"tools": [{"type": "function"}]},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ]
    found = [
        ("POST", "/v1/chat/completions", json.dumps(chat | extra | {"stream": stream}).encode(), 400)
        for extra in fields
        for stream in (False, True)
    ]
    deep = b'{"messages": ' + b"[" * 20_000
    wrong = [b"", b"{", b"[]", b"null", b'{"n": NaN}', b'{"a": "\\ud800"}', b"\xff\xfe\x00", b"\x00" * 100, deep]
    found += [("POST", path, body, 400) for path in ("/v1/chat/completions", "/v1/messages") for body in wrong]
    return found + [
        ("POST", "/v1/chat/completions", json.dumps(chat | {"model": "gpt-9"}).encode(), 404),
        ("POST", "/v1/completions", b'{"prompt": [999999999]}', 400),
        ("POST", "/v1/responses", b'{"input": "x", "previous_response_id": "resp_999999"}', 404),
        ("POST", "/v1/responses", b'{"input": ""}', 400),
        ("POST", "/v1/messages", b'{"messages": []}', 400),
        ("POST", "/api/chat", b'{"model": "nobody", "messages": []}', 404),
        ("GET", "/v1/nothing", b"", 404),
        ("GET", "/api/conversations/999999", b"", 404),
        ("GET", "/api/conversations/x", b"", 400),
        ("POST", "/api/conversations/999999/messages", b'{"parent": null, "text": "x"}', 404),
        ("POST", "/api/messages/999999/choose", b"{}", 404),
        ("POST", "/api/messages/999999/regenerate", b"{}", 404),
        ("POST", "/api/jobs/nothing/stop", b'{"candidates": [1]}', 200),
        ("GET", "/api/jobs/nothing/events", b"", 204),
        ("DELETE", "/api/conversations/999999", b"", 404),
        ("GET", "/api/kv/estimate?n=0", b"", 400),
    ]
