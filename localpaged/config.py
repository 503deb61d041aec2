"""All settings: flag before environment (LOCALPAGED_*) before config.toml before default.

Engine settings have vLLM's names. docs/settings.md is generated from this file.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from localpaged.engine.config import EngineConfig
from localpaged.errors import SettingError
from localpaged.home import home

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", "int8", "fp8", "fp8_e4m3")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(value: Any) -> Any:
    """A number of bytes from "3221225472", "3G", "3GiB" or "512 MB" (powers of 1024 throughout)."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", value, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is no size; write bytes, or for example 512M or 3G")
    return int(float(match[1]) * UNITS[match[2].upper()])


Size = Annotated[int | None, BeforeValidator(parse_bytes)]


class Settings(BaseSettings):
    """Everything that can be set. Each field is also --flag, LOCALPAGED_FIELD and an entry of config.toml."""

    model_config = SettingsConfigDict(env_prefix="LOCALPAGED_", extra="forbid", protected_namespaces=())

    model: str | None = Field(
        None, description="Model to run: a path or a name of `localpaged list`; with --base-url one of that server's."
    )
    engine: Literal["local", "openai"] = Field(
        "local", description="local: run the model here. openai: ask the server at --base-url for the answers."
    )
    base_url: str | None = Field(
        None, description="OpenAI-compatible server to ask (vLLM, SGLang, Ray Serve, ...), such as http://host:8000/v1."
    )
    remote_api_key: str | None = Field(None, description="Key that the server at --base-url wants of us.")
    remote_api_key_file: Path | None = Field(None, description="File that holds that key.")
    remote_timeout: float = Field(300, gt=0, description="Seconds that the server at --base-url may be silent.")
    served_model_name: list[str] = Field([], description="Names of the model in the API, besides its own.")
    host: str = Field("127.0.0.1", description="Address to listen on; any but loopback needs an API key.")
    port: int = Field(7860, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: str | None = Field(None, description="Key that clients must send.")
    api_key_file: Path | None = Field(None, description="File that holds the key.")
    allowed_host: list[str] = Field([], description="Further host names the server answers to.")
    allowed_origin: list[str] = Field([], description="Other sites whose pages may call the API.")
    max_request_bytes: Size = Field(32 << 20, description="Largest body of a request, such as 32M.")
    request_timeout: float = Field(30, gt=0, description="Seconds for a request's head, and for more of its body.")
    max_requests: int = Field(
        256, ge=1, description="API requests for answers at once, waiting ones too; more get 429."
    )
    stop_timeout: float = Field(
        8, ge=0, description="Seconds that running answers have at the end of the server; then they are parked."
    )
    device: str = Field("auto", description="auto (a CUDA card where there is one), cpu or cuda.")
    dtype: str = Field(
        "auto",
        description="auto or float32, on a card also bfloat16 or float16. auto: the card's 16-bit type; on a CPU the "
        "weights' fastest near-exact form.",
    )
    block_size: int = Field(16, description="Tokens a KV block, 8 to 128.")
    kv_cache_memory: Size = Field(None, description="Memory for KV, such as 2G; default: a quarter of what is free.")
    kv_cache_dtype: str = Field("auto", description="auto (as the weights), on a card also int8 or fp8.")
    gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of the device's memory for weights and KV, if kv_cache_memory is open."
    )
    swap_space: float = Field(
        0, ge=0, description="GiB of memory for KV of conversations that had to leave the pool; 0 keeps none there."
    )
    max_model_len: int | None = Field(None, description="Longest sequence; default: the model's window.")
    max_num_seqs: int = Field(64, description="Candidates that run at once.")
    max_num_batched_tokens: int | None = Field(None, description="Token budget of one step.")
    enable_prefix_caching: bool = Field(True, description="Keep and reuse computed prefixes.")
    kv_disk_space: Size = Field(
        10 << 30, description="Disk for KV of conversations between turns and runs, such as 10G; 0 keeps none."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="What goes to the terminal and to logs/ in LOCALPAGED_HOME; requests at info."
    )
    debug: bool = Field(False, description="Audit the block pool whenever the engine is idle.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = TomlConfigSettingsSource(settings_cls, toml_file=home() / "config.toml")
        return init_settings, env_settings, file

    def key(self) -> str | None:
        """The API key, from wherever it is given. Raises SettingError for a file that cannot be read or is empty."""
        return _key(self.api_key, self.api_key_file, "--api-key-file")

    def remote_key(self) -> str | None:
        """The key for the server at base_url, likewise."""
        return _key(self.remote_api_key, self.remote_api_key_file, "--remote-api-key-file")

    def engine_config(self, path: Path, name: str, keeps_kv: bool = False) -> EngineConfig:
        """What the engine is started with, for the model at path. Raises SettingError.

        keeps_kv: keep the KV of conversations, and a log, on disk; one process at a time may.
        """
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise SettingError(
                f"--kv-cache-dtype {self.kv_cache_dtype} is none of {', '.join(KV_CACHE_DTYPES)}. Choose one of these."
            )
        return EngineConfig(
            model=str(path),
            name=name,
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            kv_cache_memory=self.kv_cache_memory,
            memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            kv_folder=str(home() / "kv") if keeps_kv else None,
            kv_disk_space=self.kv_disk_space or 0,
            swap_space=self.swap_space,
            check_when_idle=self.debug,
            log_folder=str(home() / "logs") if keeps_kv else None,
            log_level=self.log_level,
        )


def _key(key: str | None, file: Path | None, flag: str) -> str | None:
    if key is not None or file is None:
        return key
    try:
        key = file.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingError(f"{flag} {file} cannot be read: {reason}.") from error
    if not key:
        raise SettingError(f"{flag} {file} is empty. Write the key into it.")
    return key


def load_settings(**flags: Any) -> Settings:
    """Settings with these flags (None: not given) on top. Raises SettingError that names what is wrong."""
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "settings"
        if first["type"] == "extra_forbidden":
            raise SettingError(
                f"config.toml or the environment sets {name!r}, which is no setting. "
                f"Settings: {', '.join(Settings.model_fields)}."
            ) from error
        raise SettingError(
            f"--{name.replace('_', '-')} (LOCALPAGED_{name.upper()}): {first['msg']}, not {first.get('input')!r}."
        ) from error
    except ValueError as error:
        raise SettingError(f"{home() / 'config.toml'} cannot be read: {error}. Mend or remove it.") from error
