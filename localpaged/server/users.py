"""Who may use a server besides the one who has its own key: names with a key each, in users.json.

Only a hash of a key is kept; keys are long and random, so that a plain one is enough. The file is read again when it
changes, so that adding and removing users needs no restart.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from pathlib import Path

import msgspec

from localpaged.errors import SettingError

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class User(msgspec.Struct, kw_only=True):
    """key_hash: SHA-256 of the key, in hexadecimal. created: since 1970, s."""

    name: str
    key_hash: str
    created: float


class Users:
    """The users of one file. Raises SettingError for a file that cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._users: list[User] = []

    def all(self) -> list[User]:
        """Everybody, in the order in which they were added. An absent file has nobody."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._users = None, []
            return []
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp != self._stamp:
            try:
                self._users = msgspec.json.decode(self._path.read_bytes(), type=list[User])
            except (OSError, msgspec.MsgspecError) as error:
                raise SettingError(f"{self._path} cannot be read: {error}. Mend or remove it.") from error
            self._stamp = stamp
        return self._users

    def with_key(self, key: str) -> User | None:
        """Whose key this is. It takes as long for a wrong one as for anybody's."""
        hashed, found = hash_of(key), None
        for user in self.all():
            if hmac.compare_digest(user.key_hash, hashed):
                found = user
        return found

    def named(self, name: str) -> User | None:
        return next((user for user in self.all() if user.name == name), None)

    def add(self, name: str) -> str:
        """Add a user; the key, which is told this once. Raises SettingError."""
        if not NAME.fullmatch(name):
            raise SettingError(f"{name!r} is no user name: up to 32 lower-case letters, digits, - and _.")
        if self.named(name) is not None:
            raise SettingError(f"There is a user {name} already. Remove that one first for a new key.")
        key = secrets.token_urlsafe(24)
        self._write([*self.all(), User(name=name, key_hash=hash_of(key), created=time.time())])
        return key

    def remove(self, name: str) -> None:
        """Raises SettingError when there is no such user."""
        if self.named(name) is None:
            raise SettingError(
                f"There is no user {name}. There are: {', '.join(u.name for u in self.all()) or 'none'}."
            )
        self._write([user for user in self.all() if user.name != name])

    def _write(self, users: list[User]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}.part")
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(users)))
            part.replace(self._path)
        except OSError as error:
            raise SettingError(f"{self._path} cannot be written: {error.strerror}.") from error
        self._stamp = None


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
