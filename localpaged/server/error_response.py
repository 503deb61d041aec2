"""Errors in the shape that the clients of the path they come from can read.

Sources: https://platform.openai.com/docs/guides/error-codes, https://docs.ollama.com/api/errors,
https://platform.claude.com/docs/en/api/errors.
"""

from typing import Any

from starlette.responses import JSONResponse

OLLAMA_PATHS = frozenset({"/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/ps", "/api/version"})
ANTHROPIC_PATHS = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_response(path: str, status: int, code: str, message: str, param: str | None = None) -> JSONResponse:
    """An error as Ollama or Anthropic write it on their paths, and as OpenAI does on all others."""
    if path in OLLAMA_PATHS:
        return JSONResponse({"error": message}, status_code=status)
    if path in ANTHROPIC_PATHS:
        return JSONResponse(anthropic_error(status, message), status_code=status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": body}, status_code=status)


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Anthropic's error object, in a response's body or within a stream."""
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
