"""Triton's interpreter without a search for builtins at every call of a function."""

import inspect
from types import ModuleType
from typing import Any


def remember_builtins() -> None:
    """Search each module and class for builtins once.

    Triton 3.9 patches them anew where a kernel calls a function, which is a fifth of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    if [*inspect.signature(interpreter._patch_builtin).parameters] != ["pkg", "builder", "scope"]:
        return
    builtins: dict[ModuleType | type, list[str]] = {}

    def patch_builtin(package: ModuleType | type, builder: Any, scope: Any) -> None:
        # The first to ask finds it as Triton made it.
        if package not in builtins:
            members = inspect.getmembers(package)
            builtins[package] = [n for n, member in members if language.core.is_builtin(member)]
        for name in builtins[package]:
            member = getattr(package, name)
            if language.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
