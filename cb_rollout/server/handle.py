"""Bind, start, drain and close the server; any thread may hold the handle.

The server runs in a daemon thread, which keeps no process alive.
"""

import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from cb_rollout.compat.torch import release_workers
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.server.options import ServerOptions
from cb_rollout.types import SyncReport

if sys.platform != "win32":
    import resource

if TYPE_CHECKING:
    from cb_rollout.server.served_model import ServedModel
    from cb_rollout.server.sessions import Session

# Longer than a start or a close takes; if it takes longer, something is broken.
START_SECONDS = 30.0
CLOSE_SECONDS = 10.0

# Time between two checks of a condition that a signal or another thread may change.
POLL_SECONDS = 0.2

# Time for responses that are being sent when the server is closed.
GRACE_SECONDS = 2

# Maximum number of connections that wait to be accepted, and that asyncio accepts at a time.
BACKLOG = 2048
ACCEPT_BATCH = 16

# Maximum number of connections if the options set none.
MAX_CONNECTIONS = 1024


def start_server(
    manager: ContinuousBatchingManager,
    tokenizer: Any,
    options: ServerOptions,
    trained: torch.nn.Module | None = None,
    sync_weights: Callable[..., SyncReport] | None = None,
) -> "ServerHandle":
    """Start a manager, and serve its model until the handle is closed.

    Args:
        manager: the manager that samples.
        tokenizer: the model's tokenizer or processor.
        options: where and how to serve.
        trained: the model that weight updates write; None: `allow_weight_updates` is refused.
        sync_weights: a generator's method, called after each update; None: updates are refused.

    Raises:
        ConfigurationError: the extra `server` is not installed, there is no tokenizer, or the
            address cannot be bound.
    """
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        raise ConfigurationError(f"serving needs {names}: pip install 'cb_rollout[server]'.")
    if tokenizer is None:
        raise ConfigurationError(
            "serving needs the model's tokenizer; pass tokenizer= to the generator."
        )
    from cb_rollout.server.served_model import ServedModel

    model = ServedModel(manager, tokenizer, options, trained, sync_weights)
    listening = bound_socket(options)
    was_served = manager.is_served
    try:
        manager.start()
        manager.is_served = True
        return ServerHandle(model, listening)
    except BaseException:
        manager.is_served = was_served
        listening.close()
        raise
    finally:
        # From here on the engine's thread computes, with a separate worker pool.
        release_workers()


class _Listener(socket.socket):
    """A listening socket from which asyncio accepts only a few connections at a time."""

    def listen(self, _: int = BACKLOG) -> None:
        super().listen(BACKLOG)


def max_connections(options: ServerOptions) -> int:
    """Return the maximum number of connections, which is at most half of the open-file limit."""
    num_files = 1 << 20
    if sys.platform != "win32":
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_files = num_files if limit == resource.RLIM_INFINITY else limit
    most = max(1, num_files // 2)
    asked = options.max_connections
    if asked is not None and asked > most:
        raise ConfigurationError(
            f"max_connections={asked} is more than half of the {num_files} files that the process "
            "may open; lower it, or raise ulimit -n."
        )
    return asked or min(MAX_CONNECTIONS, most)


def bound_socket(options: ServerOptions) -> socket.socket:
    """Return a socket that listens at the address of the options.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    max_connections(options)
    try:
        addresses = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, address = addresses[0]
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        return _Listener(fileno=listening.detach())
    except OSError as error:
        raise ConfigurationError(
            f"host={options.host!r} port={options.port} cannot be bound ({error.strerror}); choose "
            "another, or port 0 for any free port."
        ) from error


def run_application(
    application: Any, options: ServerOptions, listening: socket.socket
) -> tuple[Any, threading.Thread]:
    """Serve an ASGI application in a thread; return uvicorn's started server and the thread.

    Raises:
        RolloutError: the server did not start.
    """
    import uvicorn
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    from cb_rollout.server.middleware import limited_connections

    server = uvicorn.Server(
        uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            ws="none",
            http=limited_connections(AutoHTTPProtocol, options, max_connections(options)),
            backlog=ACCEPT_BATCH,
            timeout_graceful_shutdown=GRACE_SECONDS,
            server_header=False,
        )
    )
    thread = threading.Thread(
        target=server.run, args=([listening],), name="cb_rollout-server", daemon=True
    )
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RolloutError("the server did not start; its log says why.")
        time.sleep(0.005)
    return server, thread


class ServerHandle(AbstractContextManager["ServerHandle"]):
    """A running server.

    Attributes:
        base_url: the `base_url` of an OpenAI client, such as "http://127.0.0.1:8000/v1".
        url: the server's root, with `/health` and `/metrics`.
    """

    def __init__(self, model: "ServedModel", listening: socket.socket) -> None:
        from cb_rollout.server.api_server import create_app

        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.base_url = f"{self.url}/v1"
        self.model = model
        options = model.options
        model.sessions.url = self.url
        self._server, self._thread = run_application(create_app(model), options, listening)

    @contextmanager
    def session(self) -> Iterator["Session"]:
        """Open a session for an agent: a base URL whose answers are stored."""
        opened = self.model.sessions.open()
        try:
            yield opened
        finally:
            self.model.sessions.close(opened.id)

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def run(self, is_done: Callable[[], bool]) -> None:
        """Serve until `is_done()` or the server's end, stepping the engine on the calling thread.

        On a CPU, stepping on a waiting thread is faster; see `EngineLoop.stepping`. `is_done` is
        called every `POLL_SECONDS`, between two steps.

        Raises:
            EngineDeadError: the engine stopped on an exception.
        """
        manager = self.model.manager
        with manager.loop.stepping() as step_until:
            while self.is_running() and not is_done():
                again = time.monotonic() + POLL_SECONDS
                if step_until is None:
                    time.sleep(POLL_SECONDS)
                else:
                    step_until(lambda at=again: time.monotonic() >= at, POLL_SECONDS)
                manager.loop.require_alive()

    def drain(self, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Refuse new requests, and wait for the running requests.

        Waits up to `drain_seconds`, or until `is_enough` returns True.
        """
        self.model.is_ending = True
        deadline = time.monotonic() + self.model.options.drain_seconds
        router = self.model.output_router
        self.run(lambda: not router.num_in_flight or is_enough() or time.monotonic() >= deadline)

    def close(self) -> None:
        """Cancel and answer the requests in flight, and stop; closing again does nothing."""
        self._server.should_exit = True
        if self.is_running():
            self.model.output_router.cancel_all()
        self.model.manager.is_served = False
        self._thread.join(CLOSE_SECONDS)

    def __exit__(self, *_: object) -> None:
        self.close()
