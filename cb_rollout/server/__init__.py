"""Serve a manager's model over HTTP, in OpenAI's protocol.

Called by `RolloutGenerator.serve` and the command line. Names load on first use, so that the
command line reads `ServerOptions` without torch or FastAPI.
"""

from typing import TYPE_CHECKING

from cb_rollout.compat.lazy import lazy_names

if TYPE_CHECKING:
    from cb_rollout.server.handle import ServerHandle as ServerHandle
    from cb_rollout.server.handle import start_server as start_server
    from cb_rollout.server.options import ServerOptions as ServerOptions

__all__, __getattr__, __dir__ = lazy_names(__name__)
