"""Completions of a whole data set, resumable at any moment.

Names load on first use, so that the command line learns the options without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cb_rollout.tools.dataset.generate import generate_dataset
    from cb_rollout.tools.dataset.options import DatasetOptions
    from cb_rollout.tools.dataset.report import DatasetReport

__all__ = ["DatasetOptions", "DatasetReport", "generate_dataset"]

_HOME_OF = {
    "DatasetOptions": "options",
    "DatasetReport": "report",
    "generate_dataset": "generate",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cb_rollout.tools.dataset' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
