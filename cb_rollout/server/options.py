"""Define `ServerOptions`: the address, the access and the limits of a server.

Owns names, defaults and the checks made before the server listens. Loads neither torch nor FastAPI.
"""

import dataclasses
import ipaddress
import math
import re
from dataclasses import dataclass
from typing import Any

from cb_rollout.config.checks import known_fields_only
from cb_rollout.errors import ConfigurationError

# Names that vLLM, SGLang and uvicorn use.
SYNONYMS = {
    "served_model_name": "model_name",
    "max_model_len": "RolloutConfig(max_model_len=...)",
    "timeout_graceful_shutdown": "drain_seconds",
}

# RFC 3986's host and port, without a user: a name, an IPv4 address, or an IPv6 address in brackets.
# A port may be empty.
_AUTHORITY = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\])(?::([0-9]{0,5}))?")
MAX_PORT = (1 << 16) - 1


def _field(default: Any, help_text: str, **settings: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text}, **settings)


@known_fields_only(ConfigurationError, SYNONYMS)
@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The address, the access and the limits of a server; each field has its help text.

    Raises:
        ConfigurationError: a field is unknown, a value is out of its range, or other machines could
            connect without a key.
    """

    host: str = _field("127.0.0.1", "Address to bind; beyond this machine it takes an API key.")
    port: int = _field(8000, "Port to bind; 0: any that is free.")
    api_key: str | None = _field(
        None, "What clients must send as their key; None: no key, on this machine only.", repr=False
    )
    model_name: str = _field("policy", "What clients call the model.")
    max_connections: int | None = _field(
        None, "Most open connections; None: half of the files that the process may open, or 1024."
    )
    max_body_bytes: int = _field(8 * 1024**2, "Largest request body.")
    max_prompt_tokens: int | None = _field(None, "Longest prompt; None: what model and cache hold.")
    max_sequences: int = _field(128, "Most sequences of one request: its prompts times `n`.")
    max_images: int = _field(8, "Most pictures of one request; 0: none.")
    max_image_bytes: int = _field(6 * 1024**2, "Largest picture, as a file.")
    max_image_pixels: int = _field(16 * 1024**2, "Largest picture, in pixels.")
    request_timeout_seconds: float = _field(
        600.0, "Longest a request may take, or it is cancelled."
    )
    body_timeout_seconds: float = _field(
        30.0,
        "Longest that a request's head or body may take to arrive, or a client to take the end of "
        "an answer.",
    )
    allow_weight_updates: bool = _field(
        False,
        "Let clients replace the model's weights: those with the key, or if there is none, those "
        "of this user.",
    )
    weight_update_timeout_seconds: float = _field(
        60.0, "Longest a begun weight update waits for its next call; it is dropped then."
    )
    drain_seconds: float = _field(
        20.0, "Longest that running requests go on after shutdown begins; then they are cancelled."
    )

    def __post_init__(self) -> None:
        for name in ("host", "model_name"):
            if not isinstance(value := getattr(self, name), str) or not value:
                raise ConfigurationError(f"{name}={value!r} is not a text, or is empty.")
        if not _is_whole(self.port, 0) or self.port > MAX_PORT:
            why = f"is not a whole number in [0, {MAX_PORT}]."
            raise ConfigurationError(f"port={self.port!r} {why}")
        for name, value in vars(self).items():
            is_left_open = value is None and name in ("max_prompt_tokens", "max_connections")
            least = 0 if name == "max_images" else 1
            if name.startswith("max_") and not is_left_open and not _is_whole(value, least):
                raise ConfigurationError(f"{name}={value!r} is not a whole number >= {least}.")
            is_finite = isinstance(value, int | float) and 0 <= value < math.inf
            is_in_range = is_finite and (value != 0 or name == "drain_seconds")
            is_right = is_in_range and not isinstance(value, bool)
            if name.endswith("_seconds") and not is_right:
                least = "of 0 or more" if name == "drain_seconds" else "above 0"
                raise ConfigurationError(f"{name}={value!r} is not a finite number {least}.")
        updates = self.allow_weight_updates
        if not isinstance(updates, bool):
            raise ConfigurationError(f"allow_weight_updates={updates!r} is neither True nor False.")
        key = self.api_key
        if key is None and not is_loopback(self.host):
            raise ConfigurationError(
                f"host={self.host!r} can be reached from other machines; set api_key, or "
                "host='127.0.0.1'."
            )
        if key is not None and not (isinstance(key, str) and key.isascii() and key.strip()):
            why = "is empty, no text or not ASCII, which no header can carry."
            raise ConfigurationError(f"api_key {why}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host name or address.

    An IPv6 address may be in brackets; names are case-insensitive.
    """
    has_brackets = host.startswith("[") and host.endswith("]")
    address = host[1:-1] if has_brackets else host
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return host.lower() == "localhost"
    # The zone of an IPv6 address may be any text: "::1%evil.com" is an address too.
    may_have_brackets = found.version == 6 or not has_brackets
    return found.is_loopback and may_have_brackets and "%" not in address


def is_loopback_authority(authority: str) -> bool:
    """Return whether the `host[:port]` of a `Host` header is a loopback address.

    Any other text around or between host and port is refused, including a user name. A host name
    may end with the dot of the DNS root.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None:
        return False
    host, port = match.groups()
    if port and int(port) > MAX_PORT:
        return False
    is_rooted_name = host.lower() == "localhost."
    return is_rooted_name or is_loopback(host)


def is_loopback_origin(origin: str) -> bool:
    """Return whether an `Origin` header, `scheme://host[:port]`, has a loopback address."""
    _, separator, authority = origin.partition("://")
    return bool(separator) and is_loopback_authority(authority)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
