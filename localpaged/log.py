"""Logs: JSON lines in files that rotate, and readable lines on the terminal. No prompt and no key is in them.

Each record of a request has its id. JSON escapes line breaks, so that nothing a client sends can begin a line of its
own; the terminal's lines are escaped likewise.
"""

import logging
import logging.handlers
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
REQUESTS = "localpaged.request"
MAX_FILE_BYTES = 10 << 20
NUM_OLD_FILES = 5


class JsonLines(logging.Formatter):
    """time, level, logger, message, request_id; what a record has under `fields`; a traceback as exception."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class OneLine(logging.Formatter):
    """For people; control characters of a message are written out, tracebacks keep their lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in record.message)
        return super().formatMessage(record)


def log_to(folder: Path | None, program: str, level: str = "info") -> None:
    """Send this process's records to FOLDER/PROGRAM.log, which rotates, and to stderr. folder: None for stderr alone.

    One line a request goes to the file only.
    """
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(OneLine("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal.addFilter(lambda record: record.name != REQUESTS or record.levelno >= logging.WARNING)
    handlers: list[logging.Handler] = [terminal]
    failure = None
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = logging.handlers.RotatingFileHandler(
                folder / f"{program}.log",
                maxBytes=MAX_FILE_BYTES,
                backupCount=NUM_OLD_FILES,
                encoding="utf-8",
                errors="backslashreplace",
            )
            file.setFormatter(JsonLines())
            handlers.append(file)
        except OSError as error:
            failure = error
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    # A full disk must not fill the terminal too.
    logging.raiseExceptions = False
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if failure is not None:
        logging.getLogger(__name__).warning("No log is written to %s: %s", folder, failure.strerror)
