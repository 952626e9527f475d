"""Generate completions of a whole data set, resumably.

Names load on first use, so that the command line reads the options without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cb_rollout.tools.dataset.generate import DatasetReport, generate_dataset
    from cb_rollout.tools.dataset.options import DatasetOptions

__all__ = ["DatasetOptions", "DatasetReport", "generate_dataset"]

_MODULE_OF = {
    "DatasetOptions": "options",
    "DatasetReport": "generate",
    "generate_dataset": "generate",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cb_rollout.tools.dataset' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
