"""The folder in which everything of this project's users lives: chats.db, models/, kv/, cache/, config.toml."""

import os
from pathlib import Path

import platformdirs


def home() -> Path:
    """LOCALPAGED_HOME, or the platform's folder for user data. Not created here."""
    given = os.environ.get("LOCALPAGED_HOME")
    return Path(given).expanduser() if given else Path(platformdirs.user_data_dir("localpaged"))


def cache_folder() -> Path:
    """Where what is slow to build is kept; it may be deleted at any time."""
    return home() / "cache"
