"""Errors in the shape that OpenAI's clients expect: a status, and `{"error": {message, type}}`."""

import re
from typing import Any

from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}

# Sent when the queue is full: about the time that a short sequence takes.
RETRY_AFTER_SECONDS = 1


class ApiError(Exception):
    """An error response.

    Args:
        status: the HTTP status.
        message: the fault, and what to change.
        param: the request's field at fault.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    @property
    def body(self) -> dict[str, Any]:
        """Return the response's JSON."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": kind}}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {"retry-after": str(RETRY_AFTER_SECONDS)} if self.status == 429 else {}


def as_api_error(error: ApiError | RolloutError | TimeoutError) -> ApiError:
    """Return the error response for an exception of the engine or of a request."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            # The client sent one prompt, not an input of a batch, and uses OpenAI's names.
            text = re.sub(r"^input 0(?=:| has| is| holds)", "the prompt", str(error))
            return ApiError(400, text.replace("max_new_tokens", "max_tokens"))
        case QueueFullError():
            return ApiError(429, str(error))
        case EngineDeadError():
            return ApiError(503, "the engine stopped, and its log says why; try again later.")
        case TimeoutError():
            return ApiError(503, "the request took longer than the server allows; ask for less.")
    return ApiError(503, str(error))
