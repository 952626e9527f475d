"""Every error as OpenAI's clients expect it: a status, and `{"error": {message, type, ...}}`."""

import re
from typing import Any

from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}

RETRY_AFTER_SECONDS = 1
# What a client is told when the queue is full: about as long as a short sequence takes.


class ApiError(Exception):
    """What a request is answered where it cannot be served."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """Keep what the answer says.

        Args:
            status: one of `TYPES`.
            message: what is wrong, and what to change.
            param: the field at fault.
        """
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @property
    def body(self) -> dict[str, Any]:
        """The answer."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": kind}}

    @property
    def headers(self) -> dict[str, str]:
        """The answer's own headers."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status == 429 else {}


def as_api_error(error: ApiError | RolloutError | TimeoutError) -> ApiError:
    """What a fault of the engine's or of the request's is to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        # A client has one prompt, does not know it as an input of a batch, and has OpenAI's words.
        text = re.sub(r"^input 0 (?=has|is|holds)", "the prompt ", str(error))
        return ApiError(400, text.replace("max_new_tokens", "max_tokens"))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(503, "the engine stopped, and its log says why; try again later.")
    if isinstance(error, TimeoutError):
        return ApiError(503, "the request took longer than the server allows; ask for less.")
    return ApiError(503, str(error))
