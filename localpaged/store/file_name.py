"""A name for a downloaded file, from a title that may hold anything. Sources: RFC 6266, RFC 8187."""

import unicodedata
from urllib.parse import quote

MAX_CHARS = 80
MAX_BYTES = 200  # file systems take 255
FALLBACK = "conversation"
# What a path, a shell or a file system takes for more than a letter.
FORBIDDEN = set('/\\:*?"<>|%;')
DEVICES = {"con", "prn", "aux", "nul", *(f"{name}{digit}" for name in ("com", "lpt") for digit in range(1, 10))}


def file_name(title: str, suffix: str) -> str:
    """The title as a file's name: no separators, no characters that cannot be seen, not hidden, not a device's."""
    seen = "".join(" " if char in FORBIDDEN or unicodedata.category(char)[0] == "C" else char for char in title)
    name = " ".join(seen.split())[:MAX_CHARS].encode()[:MAX_BYTES].decode(errors="ignore").strip(" .")
    if not name or name.split(".")[0].lower() in DEVICES:
        name = f"{FALLBACK} {name}".strip()
    return name + suffix


def content_disposition(name: str) -> str:
    """The header that has a browser save an answer under this name."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = "".join(char for char in plain if char.isprintable() and char not in '"\\%')
    return f"attachment; filename=\"{plain or FALLBACK}\"; filename*=UTF-8''{quote(name, safe='')}"
