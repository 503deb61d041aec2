"""Who a request comes from, by which name it calls the server, and from which site's page.

Sources: RFC 6454, https://cheatsheetseries.owasp.org/cheatsheets/Session_Management_Cheat_Sheet.html.
"""

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from localpaged.errors import SettingError
from localpaged.server.users import Users

COOKIE = "localpaged_session"


def check_bind(host: str, api_key: str | None, users: Users | None = None) -> None:
    """Refuse to listen beyond this machine without a key. Raises SettingError."""
    if not is_loopback(host) and not api_key and not (users is not None and users.all()):
        raise SettingError(
            f"The address {host} can be reached from other machines. Set a key with --api-key (or"
            " LOCALPAGED_API_KEY), add users with `localpaged user add`, or leave --host at 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether a host name or address stays on this machine."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """Which names the server answers to, which other sites' pages may call it, and whose keys are right.

    api_key: the server's own; users: further ones. Without either nobody needs a key.
    """

    bind_host: str = "127.0.0.1"
    api_key: str | None = None
    allowed_hosts: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()
    users: Users | None = None

    def allows_host(self, header: str | None) -> bool:
        name = _host_name(header or "")
        if is_loopback(name) or name in {host.lower() for host in self.allowed_hosts}:
            return True
        if is_loopback(self.bind_host):
            return False
        # Reachable from outside: an address cannot be rebound by DNS, a name must be known.
        return name == self.bind_host.lower() or _is_address(name)

    def allows_origin(self, origin: str, host: str | None) -> bool:
        if origin in self.allowed_origins:
            return True
        return origin != "null" and urlsplit(origin).netloc.lower() == (host or "").lower()

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or (self.users is not None and bool(self.users.all()))

    def user_with_key(self, key: str) -> str | None:
        """Whose key this is: a user's name, "" for the server's own key; None for nobody's."""
        # Both are looked at in any case, so that the time tells nothing.
        user = self.users.with_key(key) if self.users is not None else None
        if self.api_key is not None and hmac.compare_digest(key.encode(), self.api_key.encode()):
            return ""
        return user.name if user is not None else None

    def session(self, user: str) -> str:
        """What a logged-in browser's cookie holds: derived from the user's key, without giving it away.

        Raises KeyError for a user who is not there any more.
        """
        return f"{user}.{hmac.new(self._secret(user).encode(), b'localpaged session 2', hashlib.sha256).hexdigest()}"

    def _secret(self, user: str) -> str:
        if user == "" and self.api_key is not None:
            return self.api_key
        known = self.users.named(user) if self.users is not None else None
        if known is None:
            raise KeyError(user)
        return known.key_hash

    def user_of(self, headers: Headers) -> str | None:
        """Who sent a request, by the key or the session that it carries; None where it carries none that is right."""
        if not self.needs_key:
            return ""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and (user := self.user_with_key(token.strip())) is not None:
            return user
        # As Anthropic's API has it.
        if (key := headers.get("x-api-key")) is not None and (user := self.user_with_key(key.strip())) is not None:
            return user
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
            if morsel is None:
                return None
            name = morsel.value.rpartition(".")[0]
            right = self.session(name)
        except (CookieError, KeyError):
            return None
        return name if hmac.compare_digest(morsel.value.encode(), right.encode()) else None


def _host_name(header: str) -> str:
    """The name of a Host header, without its port."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/@]+)(?::\d+)?", header)
    return match.group(1).lower().rstrip(".") if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
