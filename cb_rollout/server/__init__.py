"""An HTTP server that speaks OpenAI's protocol for the model of a manager.

Called by `RolloutGenerator.serve` and the command line. Names load on first use, so that the
command line reads `ServerOptions` without torch or FastAPI.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cb_rollout.server.handle import ServerHandle, start_server
    from cb_rollout.server.options import ServerOptions

__all__ = ["ServerHandle", "ServerOptions", "start_server"]

_MODULE_OF = {"ServerHandle": "handle", "ServerOptions": "options", "start_server": "handle"}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cb_rollout.server' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
