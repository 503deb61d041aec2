"""What JSON can spell and nothing here can keep: halves of surrogate pairs, and numbers that are not finite.

Stored once, they would break every answer that contains them. Sources: RFC 8259, sections 6 and 8.2.
"""

import json
import math
import re

# Only a body with one of these is looked at closely. A run of digits is looked at from its beginning alone, so that
# the time is linear in the body.
SUSPICIOUS = re.compile(rb"\\u[dD][89a-fA-F]|NaN|Infinity|\d[eE]\+?\d{3}|(?<!\d)\d{300}")


def unsound(body: bytes) -> str | None:
    """Why a body cannot be taken; None for one that can, and for one that is no JSON, of which others tell."""
    if not SUSPICIOUS.search(body):
        return None
    try:
        value = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except _NotFinite as error:
        return f"The body has the number {error}, which JSON does not know or which is too large. Send another."
    except (ValueError, RecursionError):
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "The body has half of a surrogate pair (such as \\ud83d alone), which is no text. Send whole characters."
    except (ValueError, RecursionError):
        return None
    return None


class _NotFinite(Exception):
    pass


def _refuse(name: str) -> float:
    raise _NotFinite(name)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise _NotFinite(text[:40])
    return value
