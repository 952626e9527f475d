"""Launches of Xinference's protocol: names that clients give the one model of the server.

Owns those names, and the checks of a launch. A launch loads nothing: it names the checkpoint that
the server already runs; any other checkpoint is refused. Used on the server's asyncio thread.
"""

import os
import re
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationInfo, field_validator

from cb_rollout.server.protocol import ApiError, Strict, require_allowed

# A client that launches again and again without terminating must not fill the memory.
MAX_LAUNCHES = 256

# Xinference's status when it has no room for another model; 403 means a missing permission.
CANNOT_LAUNCH = 503

# Longest time, in seconds, for which an aborted request's id stays blocked.
MAX_BLOCK_SECONDS = 3600

Uid = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,256}$")]

_DEVICE = "the server chose its device; start it with --device"
_NO_ENVIRONMENT = "a launch starts no process; set it where the server starts"

# By field of a launch: the value that it may have besides null, and why it may have no other.
REFUSED: dict[str, tuple[Any, str]] = {
    "model_type": ("LLM", "this server has a causal language model"),
    "model_format": ("pytorch", "this server reads transformers' checkpoints"),
    "quantization": ("none", "a launch quantises nothing; serve a quantised checkpoint"),
    "replica": (1, "this server has one model; start more servers"),
    "n_worker": (1, "this server has one process; start more servers"),
    "n_gpu": ("auto", _DEVICE),
    "gpu_idx": (None, _DEVICE),
    "worker_ip": (None, _DEVICE),
    "replica_config": (None, "this server has one model; start more servers"),
    "request_limits": (None, "start the server with --max-queue-size"),
    "peft_model_config": (None, "serve a checkpoint that has the adapter merged"),
    "enable_thinking": (None, "the chat template decides; leave it out"),
    "enable_virtual_env": (False, _NO_ENVIRONMENT),
    "virtual_env_packages": (None, _NO_ENVIRONMENT),
    "virtual_env_find_links": (None, _NO_ENVIRONMENT),
    "envs": (None, _NO_ENVIRONMENT),
}


class LaunchRequest(Strict):
    """Body of `POST /v1/models`, with the names of Xinference's `launch_model`."""

    model_name: Annotated[str, Field(min_length=1, max_length=256)]
    model_uid: Uid | None = None
    model_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    model_engine: str | None = None
    max_num_seqs: int | None = None
    model_size_in_billions: int | str | None = None
    """Accepted and not used: the checkpoint determines the size."""

    model_type: Any = None
    model_format: Any = None
    quantization: Any = None
    replica: Any = None
    n_worker: Any = None
    n_gpu: Any = None
    gpu_idx: Any = None
    worker_ip: Any = None
    replica_config: Any = None
    request_limits: Any = None
    peft_model_config: Any = None
    enable_thinking: Any = None
    enable_virtual_env: Any = None
    virtual_env_packages: Any = None
    virtual_env_find_links: Any = None
    envs: Any = None

    @field_validator(*REFUSED)
    @classmethod
    def _refuse(cls, value: Any, info: ValidationInfo) -> Any:
        return require_allowed(REFUSED, value, info)

    @field_validator("model_engine")
    @classmethod
    def _require_transformers(cls, engine: str | None) -> str | None:
        if engine is not None and engine.lower() != "transformers":
            raise ValueError("this server takes the place of Xinference's engine transformers")
        return engine


class BlockRequest(Strict):
    """Body of an abort: for how many seconds new requests with this id are aborted too."""

    block_duration: Annotated[int, Field(ge=0, le=MAX_BLOCK_SECONDS)] = 30


class Launches:
    """The names under which clients launched the server's model."""

    def __init__(self, model: torch.nn.Module, model_name: str, max_num_seqs: int) -> None:
        """Begin without a launch.

        Args:
            model: the model that runs; its `name_or_path` is the checkpoint.
            model_name: the server's own name for it.
            max_num_seqs: the most sequences that the engine decodes together.
        """
        self._own_name, self._max_num_seqs = model_name, max_num_seqs
        self._checkpoint = str(getattr(model, "name_or_path", None) or "")
        self._paths = {self._checkpoint} - {""}
        if os.path.isdir(self._checkpoint):
            self._paths |= {os.path.abspath(self._checkpoint), os.path.realpath(self._checkpoint)}
        self._launched: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Return the names that clients may send, the server's own first."""
        return [self._own_name, *sorted(self._launched - {self._own_name})]

    def launch(self, body: LaunchRequest) -> str:
        """Return the name of a launch; `ApiError` if it asks for a model that does not run here."""
        if not self._is_own(body):
            runs = self._checkpoint or self._own_name
            raise ApiError(
                CANNOT_LAUNCH,
                f"this server runs {runs!r:.300} and loads no other model; launch that one by its "
                "model_path, or start a second cb-rollout serve with yours, on another --port.",
                "model_path",
            )
        if body.max_num_seqs not in (None, self._max_num_seqs):
            raise ApiError(
                400,
                f"the model runs with max_num_seqs={self._max_num_seqs}; leave it out, or start "
                f"the server with --max-num-seqs {body.max_num_seqs}.",
                "max_num_seqs",
            )
        if len(self._launched) >= MAX_LAUNCHES:
            raise ApiError(429, f"{MAX_LAUNCHES} launches are open; terminate some.", "model_uid")
        uid = self._free_name(body)
        self._launched.add(uid)
        return uid

    def terminate(self, uid: str) -> None:
        """Forget a launch; `ApiError`: there is none, or it is the server's own name."""
        if uid in self._launched:
            self._launched.remove(uid)
            return
        if uid == self._own_name:
            raise ApiError(400, f"{uid!r} was not launched; it ends with the server.", "model_uid")
        raise ApiError(404, f"the model {uid!r:.100} was not launched.", "model_uid")

    def _is_own(self, body: LaunchRequest) -> bool:
        if body.model_path is None:
            return body.model_name in (self._own_name, self._checkpoint)
        # Paths are compared as text: a client's path is never looked up.
        return body.model_path in self._paths or os.path.abspath(body.model_path) in self._paths

    def _free_name(self, body: LaunchRequest) -> str:
        if body.model_uid is not None:
            if body.model_uid in self.names:
                why = f"a model of the uid {body.model_uid!r} is launched already; take another."
                raise ApiError(400, why, "model_uid")
            return body.model_uid
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", body.model_name)
        taken = self._launched | ({self._own_name} - {name})
        number, uid = 0, name
        while uid in taken:
            number += 1
            uid = f"{name}-{number}"
        return uid
