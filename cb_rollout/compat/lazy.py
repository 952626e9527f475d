"""Load a package's public names on first use (PEP 562).

The list of the names is the package's own imports for type checkers, under `if TYPE_CHECKING:`.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of the package that calls."""
    module: Any = sys.modules[package]
    tree = ast.parse(module.__spec__.loader.get_source(package))
    module_of = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(module, name, value)
        return value

    return sorted(module_of), load, lambda: sorted({*vars(module), *module_of})
