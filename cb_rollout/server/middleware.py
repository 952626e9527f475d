"""Access control in front of the application: connections, API key, body size and time limits.

Owns the checks that need no parsing, and makes them before any part of a request is parsed. Logs
nothing that a client sent. Called on the server's asyncio thread.
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cb_rollout.metrics.observer import observer
from cb_rollout.server.options import (
    ServerOptions,
    is_loopback_authority,
    is_loopback_origin,
)
from cb_rollout.server.protocol import ApiError, as_api_error

# Without a key, load balancers ask whether the engine runs, and Xinference's client asks whether it
# must send a key.
OPEN_PATHS = {"/health", "/v1/cluster/auth"}

# If the server has no key, these paths answer only the user of this process.
WEIGHT_PATHS = {
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
    "/finish_weight_update", "/shutdown_weight_transfer_engine",
}  # fmt: skip

# Linux's lists of connections, which name the user of each connection, and the state of an open
# connection.
CONNECTION_LISTS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"


# Largest head of a request: twice as much as other servers accept.
MAX_HEAD_BYTES = 1 << 16


class LimitedConnection(asyncio.Protocol):
    """Limit the time of a connection and the number of connections; see `limited_connections`.

    uvicorn 0.54 waits without a limit for the head of a connection's first request, for the rest of
    a later head, and for a client that does not read.
    """

    most: int
    waiting_seconds: float
    busy_seconds: float
    # Attributes of uvicorn's protocol class.
    loop: asyncio.AbstractEventLoop
    connections: set["LimitedConnection"]
    transport: asyncio.Transport
    cycle: Any

    waiting_since: float | None = None
    """Time since which no request has been running; None while a request runs."""
    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the time limit; close the connection that waited longest if there are too many."""
        super().connection_made(transport)
        self._begin_limit()
        if len(self.connections) > self.most:
            waiting = [each for each in self.connections if each.waiting_since is not None]
            min(waiting, key=lambda each: each.waiting_since or 0.0).end()

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_running() and self.waiting_since is not None:
            self._begin_limit()
        is_long = self.waiting_since is not None and self._num_head_bytes > MAX_HEAD_BYTES
        if is_long and not self.transport.is_closing():
            self.end()

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        self._begin_limit()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not a request; while a request runs, close the connection instead.

        uvicorn 0.54 sends a second answer, and logs a traceback when the first answer follows.
        """
        if self._is_running():
            self.end()
        else:
            super().send_400_response(msg)  # type: ignore[misc]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection now, even if data is unsent."""
        self.connections.discard(self)
        self.transport.abort()

    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _begin_limit(self) -> None:
        """Limit the time of the request that runs, or of the wait for a head."""
        is_running = self._is_running()
        self.waiting_since = None if is_running else self.loop.time()
        self._num_head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
        seconds = self.busy_seconds if is_running else self.waiting_seconds
        self._timer = self.loop.call_later(seconds, self.end)


def limited_connections(protocol: type[Any], options: ServerOptions, most: int) -> type[Any]:
    """Return a class of `uvicorn.protocols.http` with limits; it allows `most` connections."""
    limits = {
        "most": most,
        "waiting_seconds": options.body_timeout_seconds,
        # The middleware answers earlier, if the client reads the answer.
        "busy_seconds": options.request_timeout_seconds + 3 * options.body_timeout_seconds,
    }
    return type("LimitedProtocol", (LimitedConnection, protocol), limits)


class AccessMiddleware:
    """Wrap an ASGI application with the limits of `ServerOptions`."""

    def __init__(self, application: ASGIApp, options: ServerOptions) -> None:
        self._application = application
        self._options = options
        self._key_digest = None if options.api_key is None else _digest(options.api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        # The time to receive the body, to generate the answer, and to send it.
        seconds = self._options.request_timeout_seconds + 2 * self._options.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                self._require_access(scope)
                body = await self._body(scope, receive)
                with observer().joined(_text_headers(scope)):
                    await self._application(scope, _replayed(body, receive), watched_send)
        except ApiError as error:
            await _refusal(error)(scope, receive, send)
        except TimeoutError:
            # If the answer has begun, the closed connection shows that the answer is incomplete.
            if not has_begun:
                await _refusal(as_api_error(TimeoutError()))(scope, receive, send)

    def _require_access(self, scope: Scope) -> None:
        if self._key_digest is None:
            # A web page can point its own host name at this machine's address (DNS rebinding).
            # Several Host headers are refused: the application might read another than this check.
            hosts = _values(scope, b"host")
            if len(hosts) != 1 or not is_loopback_authority(hosts[0]):
                why = "without an API key this server answers to localhost and 127.0.0.1 only."
                raise ApiError(401, why)
            # A page of another site can send a request without a body, though not read its answer.
            if not all(map(is_loopback_origin, _values(scope, b"origin"))):
                raise ApiError(401, "without an API key this server answers no page of a web site.")
            if scope["path"] in WEIGHT_PATHS and not is_own_user(scope):
                raise ApiError(
                    401,
                    "without an API key this server takes weights from its own user only, whom it "
                    "knows on Linux; start it with --api-key.",
                )
        elif scope["path"] not in OPEN_PATHS:
            headers = dict(scope["headers"])
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(_digest(key.strip()), self._key_digest)
            if scheme.lower() != b"bearer" or not is_right:
                raise ApiError(401, "the API key is missing or wrong.")

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._options.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit:,} bytes.")
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise too_large
        body = bytearray()
        has_more = True
        seconds = self._options.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                while has_more:
                    # The message of a disconnected client has neither field.
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    has_more = message.get("more_body", False)
        except TimeoutError as error:
            raise ApiError(400, f"the body did not arrive within {seconds:g} s.") from error
        return bytes(body)


def is_own_user(
    scope: Scope, lists: Sequence[Path] = CONNECTION_LISTS, user: int | None = None
) -> bool:
    """Return whether `lists` of connections show that a request came from `user`.

    `user` None: the user of this process.
    """
    ports = [f"{address[1]:04X}" for address in (scope["client"], scope["server"]) if address]
    users = set()
    for path in lists:
        with suppress(OSError):
            for line in path.read_text().splitlines()[1:]:
                _, local, remote, state, *fields = line.split()
                is_its = [local.rpartition(":")[2], remote.rpartition(":")[2]] == ports
                if is_its and state == ESTABLISHED:
                    users.add(int(fields[3]))
    # A connection between the same ports of other addresses cannot be told apart; if it is another
    # user's, the request is refused.
    expected = os.getuid() if user is None else user
    return users == {expected}


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that repeats the body, then continues with the later messages."""
    whole = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Message:
        return next(whole, None) or await receive()

    return replay


def _refusal(error: ApiError) -> JSONResponse:
    # The rest of a refused body is not read.
    return JSONResponse(error.body, error.status, {"connection": "close", **error.headers})


def _text_headers(scope: Scope) -> dict[str, str]:
    headers = {}
    for name, value in scope["headers"]:
        headers[name.decode("latin-1")] = value.decode("latin-1")
    return headers


def _values(scope: Scope, name: bytes) -> list[str]:
    """Return the value of each header with a name, without the white space around it."""
    values = []
    for key, value in scope["headers"]:
        if key == name:
            values.append(value.decode("latin-1").strip(" \t"))
    return values


def _digest(key: bytes) -> bytes:
    # Digests have one length, so the time of a comparison does not depend on the key.
    return hashlib.sha256(key).digest()
