"""Where the server is that answers for us, and how it is spoken to."""

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from localpaged.config import Settings
from localpaged.errors import SettingError


@dataclass(frozen=True)
class RemoteConfig:
    """base_url: what /models and /chat/completions come after. timeout_s: how long the server may be silent.

    api_key is not shown where this is printed. model: None takes the first that the server names.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 300.0

    def __repr__(self) -> str:
        return f"RemoteConfig({self.base_url!r}, model={self.model!r})"


def remote_config(settings: Settings) -> RemoteConfig | None:
    """The remote of these settings; None where the engine is our own. Raises SettingError when they do not fit."""
    if settings.engine == "local":
        if settings.base_url is not None:
            raise SettingError(
                "--base-url names another server, which only answers with --engine openai. Add that, or leave it out."
            )
        return None
    if settings.base_url is None:
        raise SettingError(
            "--engine openai needs the server's address: add --base-url, such as http://127.0.0.1:8000/v1."
        )
    key = settings.remote_key()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise SettingError(
            "The key for the server at --base-url has characters that no header carries. Check its file."
        )
    return RemoteConfig(checked_url(settings.base_url), settings.model, key, settings.remote_timeout)


def checked_url(url: str) -> str:
    """The base URL without a slash at its end; one without a path gets OpenAI's, /v1. Raises SettingError."""
    try:
        parts = urlsplit(url.strip())
        host, _ = parts.hostname, parts.port
        httpx.URL(url.strip())
    except (ValueError, httpx.InvalidURL) as error:
        raise SettingError("--base-url is no address that can be read. Try one like http://127.0.0.1:8000.") from error
    # The URL is not repeated: what is shown and logged must not have a password in it.
    if parts.username is not None or parts.password is not None:
        raise SettingError("--base-url has a user or password in it. Give a key with --remote-api-key-file instead.")
    if parts.scheme not in ("http", "https") or not host:
        raise SettingError("--base-url is no http:// or https:// address. Try one like http://127.0.0.1:8000.")
    if parts.query or parts.fragment:
        raise SettingError("--base-url ends in a query or a fragment. Give the address up to its path, such as .../v1.")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
