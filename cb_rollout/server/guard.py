"""What stands before the application: who may speak, how much, and for how long.

Owns the checks that need no understanding of a request, made before any of it is parsed. Logs
nothing that a client sent.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from cb_rollout.server.errors import ApiError, as_api_error
from cb_rollout.server.options import ServerOptions, is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health"})
# What needs no key: a balancer asks it, and it says only whether all is well.


class Guard:
    """Wraps an ASGI application."""

    def __init__(self, application: Application, options: ServerOptions) -> None:
        """Stand before `application`."""
        self._application, self._options = application, options
        self._key_digest = None if options.api_key is None else _digest(options.api_key.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Let one request pass, or answer it here."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        # To send the body, to be answered, and to take the answer.
        seconds = self._options.request_timeout_seconds + 2 * self._options.body_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                self._require_let_in(scope)
                body = await self._body(scope, receive)
                await self._application(scope, _replayed(body, receive), watched_send)
        except ApiError as error:
            await _answer(error, send)
        except TimeoutError:
            # Of an answer that has begun, the closed connection says that it is not whole.
            if not has_begun:
                await _answer(as_api_error(TimeoutError()), send)

    def _require_let_in(self, scope: MutableMapping[str, Any]) -> None:
        headers = dict(scope["headers"])
        if self._key_digest is None:
            # Without a key a web page must not reach this machine's server by a name of its own.
            host = headers.get(b"host", b"").decode("latin-1")
            name = host[: host.find("]") + 1] or host.partition(":")[0]
            if not is_loopback(name):
                raise ApiError(
                    401, "without an API key this server answers to localhost and 127.0.0.1 only."
                )
        elif scope["path"] not in OPEN_PATHS:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            is_right = hmac.compare_digest(_digest(given.strip()), self._key_digest)
            if scheme.lower() != b"bearer" or not is_right:
                raise ApiError(401, "the API key is missing or wrong.")

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        limit = self._options.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit:,} bytes.")
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise too_large
        parts, size, is_whole = [], 0, False
        try:
            async with asyncio.timeout(self._options.body_timeout_seconds):
                while not is_whole:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    is_whole = not message.get("more_body", False)
        except TimeoutError as error:
            seconds = self._options.body_timeout_seconds
            raise ApiError(400, f"the body did not arrive within {seconds:g} s.") from error
        return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body once more, then what comes after it."""
    is_told = False

    async def replay() -> Message:
        nonlocal is_told
        if is_told:
            return await receive()
        is_told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _answer(error: ApiError, send: Send) -> None:
    content = json.dumps(error.body).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        # What is left of a body that was refused is not read.
        "connection": "close",
        **error.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's, so that comparing tells nothing by its time."""
    return hashlib.sha256(key).digest()
