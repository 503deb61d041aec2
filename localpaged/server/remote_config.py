"""Where the server is that answers for us, and how it is spoken to."""

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from localpaged.config import Settings
from localpaged.errors import SettingError

# What only an engine of our own does.
OF_OUR_ENGINE = (
    "device",
    "dtype",
    "block_size",
    "kv_cache_memory",
    "kv_cache_dtype",
    "gpu_memory_utilization",
    "swap_space",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "kv_disk_space",
    "debug",
)


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
    useless = [name for name in OF_OUR_ENGINE if getattr(settings, name) != Settings.model_fields[name].default]
    if useless:
        flags = ", ".join("--" + name.replace("_", "-") for name in useless)
        raise SettingError(
            f"With --engine openai the other server decides on {flags}. Leave that out, also in config.toml and the "
            "environment."
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
