"""Load a package's public names on first use (PEP 562).

The names are those that the package imports for type checkers, under `if TYPE_CHECKING:`.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` for the calling package."""
    module: Any = sys.modules[package]
    tree = ast.parse(module.__spec__.loader.get_source(package))
    module_of: dict[str, str] = {}
    for block in tree.body:
        if not isinstance(block, ast.If):
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module_of[alias.name] = node.module

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted(set(vars(module)) | set(module_of))

    return sorted(module_of), load, names
