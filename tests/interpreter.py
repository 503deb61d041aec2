"""Import this to make Triton's interpreter bearable: it patches triton.language anew for every call within a kernel.

Once is enough where nothing is compiled, and a third of the time.
"""

import inspect
from types import FunctionType

from triton.runtime import interpreter

_patch_language = interpreter._patch_lang
_patched: set[frozenset[str]] = set()


class _Kept:
    """Stands in for the scope that would undo the patches."""

    def restore(self) -> None:
        pass


def _patch_once(function: FunctionType) -> _Kept:
    modules = frozenset(
        value.__name__
        for value in function.__globals__.values()
        if inspect.ismodule(value) and value in (interpreter.tl, interpreter.tl.core)
    )
    if modules not in _patched:
        _patched.add(modules)
        _patch_language(function)
    return _Kept()


interpreter._patch_lang = _patch_once
