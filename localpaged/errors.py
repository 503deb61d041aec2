"""Errors that a user can cause or meet. Each message states the fact and the remedy."""


class LocalpagedError(Exception):
    """The base of every error that is shown to a person as it is, without a traceback."""

    code = "error"


class InvalidRequestError(LocalpagedError, ValueError):
    """A request whose content is wrong; param names the field."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """The prompt and what it asks for can never fit the model's window or the block pool."""

    code = "context_length_exceeded"


class ModelNotFoundError(InvalidRequestError):
    """A request for a model that is not served here."""

    code = "model_not_found"


class FeatureAbsentError(InvalidRequestError):
    """A request for something that the engine that is there cannot do or tell."""

    code = "not_available"


class SettingError(LocalpagedError, ValueError):
    """A flag, environment variable or config.toml entry that cannot be used."""

    code = "setting"


class ModelError(LocalpagedError):
    """A model that is missing, truncated, or not supported."""

    code = "model"


class EngineDeadError(LocalpagedError):
    """The engine process ended while it had work; the next message starts a fresh one."""

    code = "engine_dead"


class RemoteError(LocalpagedError):
    """The server that answers for us failed, or refused us."""

    code = "remote"


class RemoteAwayError(RemoteError):
    """The server that answers for us cannot be reached."""

    code = "remote_away"


class RemoteBusyError(RemoteError):
    """The server that answers for us has too much to do."""

    code = "remote_busy"


class StoreError(LocalpagedError):
    """The conversation database cannot be used: newer, locked, damaged, or the disk is full."""

    code = "store"


class DownloadError(LocalpagedError):
    """A model could not be fetched from the hub."""

    code = "download"
