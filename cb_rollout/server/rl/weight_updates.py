"""Weight updates over HTTP, in vLLM's four phases: init, start, update, finish.

Owns the one update that may be open. Its tensors are staged and checked beside the model, and
written at its finish, in a pause, under one new policy version. An update that fails anywhere
before is dropped and leaves the weights as they are. Used on the server's asyncio thread; what
waits or copies runs on a thread of its own.
"""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import ConfigurationError, WeightSyncError
from cb_rollout.server.errors import ApiError
from cb_rollout.server.rl.bodies import BroadcastUpdate, FileUpdate, InitInfo
from cb_rollout.server.rl.staged_weights import StagedWeights
from cb_rollout.server.rl.weight_group import WeightGroup
from cb_rollout.types import SyncReport
from cb_rollout.weights.adapters import has_adapters

T = TypeVar("T")

InFlightName = Literal["keep", "recompute", "abort"]

# Begins a policy version with the weights that were written, in a pause.
Sync = Callable[[InFlightName], SyncReport]

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool")
}


@dataclass(slots=True)
class _Update:
    """The update that is open."""

    staged: StagedWeights
    is_partial: bool
    update_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_busy: bool = False
    """True while a call of it runs."""
    expiry: asyncio.TimerHandle | None = None
    """Drops it where no next call comes."""


class WeightUpdates:
    """The weight updates of one served model.

    Args:
        manager: the engine's.
        trained: the model whose weights are written, maybe wrapped.
        sync: begins a policy version with them.
        timeout_seconds: longest time that an open update waits for its next call, or a broadcast
            for its trainer.

    Raises:
        ConfigurationError: the model's weights are not plain whole tensors.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        trained: torch.nn.Module,
        sync: Sync,
        timeout_seconds: float,
    ) -> None:
        self._manager, self._sync, self._seconds = manager, sync, timeout_seconds
        self._model = hf_compat.unwrap(trained)
        is_plain = not (hf_compat.is_quantized(self._model) or has_adapters(self._model))
        if not is_plain or fsdp_compat.is_sharded(trained):
            raise ConfigurationError(
                "allow_weight_updates: the model is quantised, sharded or has adapters, so its "
                "tensors are not those that a trainer sends; serve a plain model."
            )
        self._thread = ThreadPoolExecutor(1, "cb_rollout-weights")
        self._open: _Update | None = None
        self._group: WeightGroup | None = None
        self._init_info: InitInfo | None = None
        # Why the last update was dropped, for its trainer's next call.
        self._fault = "none was begun"
        # Names that a failed write may have left half written.
        self._torn: set[str] = set()
        self.weight_version: str | None = None
        """The trainer's own name of the present weights; None: it gave none."""

    def stop(self) -> None:
        """Drop an open update, and end the thread."""
        if self._open is not None:
            self.drop(self._open, "the server ends")
        self._group = None
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def init(self, info: InitInfo) -> None:
        """Join a trainer's group; without an address there is none, and files are sent.

        Raises:
            ApiError: the group cannot be joined, or another trainer's update is open.
        """
        self._refuse_second()
        if info.master_address is None or info.master_port is None:
            self._group, self._init_info = None, info
            return
        if info.backend != "gloo":
            raise ApiError(
                400,
                'weights are received by gloo or from files, not by NCCL; set backend to "gloo" '
                "in init_info, or send weight_dir.",
                "init_info",
            )
        self._group = None
        try:
            self._group = await self._run(
                WeightGroup.join,
                info.master_address,
                info.master_port,
                info.rank_offset,
                info.world_size,
                self._seconds,
            )
        except WeightSyncError as error:
            raise ApiError(400, str(error), "init_info") from error
        self._init_info = info

    async def shutdown(self) -> None:
        """Leave the trainer's group."""
        self._refuse_second()
        self._group = None

    def start(self, is_partial: bool) -> str:
        """Begin an update, and return its id.

        Args:
            is_partial: tensors that are not sent keep their values; False: all must be sent.

        Raises:
            ApiError: another update is open.
        """
        self._refuse_second()
        self._open = _Update(StagedWeights(self._model), is_partial)
        self.await_next_call(self._open)
        return self._open.update_id

    async def add(self, info: FileUpdate | BroadcastUpdate, update_id: str | None) -> int:
        """Stage tensors, and return how many are staged by now.

        Raises:
            ApiError: no update is open, or the tensors are refused, which drops it.
        """
        update = self._require_open(update_id)
        with _Call(self, update):
            if isinstance(info, FileUpdate):
                await self._run(self._add_files, update.staged, info)
            else:
                await self._run(self._receive, update.staged, info)
        return len(update.staged)

    async def finish(
        self, update_id: str | None, in_flight: InFlightName, weight_version: str | None
    ) -> dict[str, Any]:
        """Write the staged tensors under a new policy version, and return a report.

        Args:
            update_id: of the update; None: the open one's.
            in_flight: fate of unfinished sequences, as `sync_weights` takes it.
            weight_version: the trainer's own name of the weights.

        Raises:
            ApiError: no update is open, or a tensor is missing, which drops it.
        """
        update = self._require_open(update_id)
        # A write cannot be interrupted; a caller that waits no longer leaves it to its end.
        writing = asyncio.ensure_future(self._finish(update, in_flight, weight_version))
        return await asyncio.shield(writing)

    async def _finish(
        self, update: _Update, in_flight: InFlightName, weight_version: str | None
    ) -> dict[str, Any]:
        with _Call(self, update):
            if not update.is_partial:
                update.staged.require_whole()
            if self._torn:
                update.staged.require_names(self._torn)
            report = await self._run(self._write, update.staged, in_flight)
        self._close(update, "the last one is finished")
        self.weight_version = weight_version
        return {
            "policy_version": report.policy_version,
            "num_tensors": len(update.staged),
            "num_bytes": update.staged.num_bytes,
            "seconds": report.seconds,
        }

    async def replace(self, info: FileUpdate) -> dict[str, Any]:
        """Start, update and finish in one call, from files."""
        update_id = self.start(is_partial=False)
        await self.add(info, update_id)
        return await self.finish(update_id, "recompute", None)

    def drop(self, update: _Update, fault: str) -> None:
        """Drop an update; the weights stay as they are."""
        if self._open is update:
            self._close(update, fault)
            # A trainer that still broadcasts gets an error, not a receiver of something else.
            self._group = None

    def _close(self, update: _Update, fault: str) -> None:
        if update.expiry is not None:
            update.expiry.cancel()
        self._open, self._fault = None, fault

    def await_next_call(self, update: _Update) -> None:
        """Drop an update unless its next call comes in time."""
        fault = f"it waited longer than {self._seconds:g} s for its next call"
        running = asyncio.get_running_loop()
        update.expiry = running.call_later(self._seconds, self.drop, update, fault)

    def _add_files(self, staged: StagedWeights, info: FileUpdate) -> None:
        # transformers changes the process's default dtype while it loads.
        needs_pause = staged.needs_conversion(info.weight_dir)
        with self._manager.loop.paused() if needs_pause else nullcontext():
            staged.add_files(info.weight_dir, info.sha256)

    def _receive(self, staged: StagedWeights, info: BroadcastUpdate) -> None:
        if not len(info.names) == len(info.dtype_names) == len(info.shapes):
            raise WeightSyncError("names, dtype_names and shapes differ in length.")
        if unknown := sorted(set(info.dtype_names) - DTYPES.keys()):
            raise WeightSyncError(f"the dtype {unknown[0]!r} is not one of {', '.join(DTYPES)}.")
        dtypes = [DTYPES[name] for name in info.dtype_names]
        described = list(zip(info.names, dtypes, map(tuple, info.shapes), strict=True))
        staged.require_fit(described)
        group, init_info = self._group, self._init_info
        if group is None or init_info is None:
            raise WeightSyncError(
                "there is no group to receive them by; call /init_weight_transfer_engine with its "
                "address first."
            )
        is_packed = init_info.packed if info.packed is None else info.packed
        buffer_bytes = init_info.packed_buffer_size_bytes if is_packed else None
        staged.add(group.receive(described, buffer_bytes, info.sha256))

    def _write(self, staged: StagedWeights, in_flight: InFlightName) -> SyncReport:
        with self._manager.paused(in_flight):
            self._torn |= staged.names()
            try:
                staged.write()
                report = self._sync(in_flight)
            except BaseException:
                # No token may come of a mixture.
                self._manager.loop.hold(PauseReason.UPDATE)
                raise
            self._torn = set()
            self._manager.pauses.release(PauseReason.UPDATE)
        return report

    def _refuse_second(self) -> None:
        """Raise 409 while an update is open."""
        if self._open is not None:
            raise ApiError(
                409,
                "another weight update is open; it has to finish first, or is dropped "
                f"{self._seconds:g} s after its last call.",
            )

    def _require_open(self, update_id: str | None) -> _Update:
        update = self._open
        if update is None or update_id not in (None, update.update_id):
            fault = self._fault if update is None else "another trainer's is"
            raise ApiError(
                409,
                f"no such weight update is open ({fault}); the weights are those of policy version "
                f"{self._manager.policy_version}.",
            )
        if update.is_busy:
            raise ApiError(409, "another call of this weight update still runs.")
        return update

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)


class _Call:
    """One call of an update, which drops the update if it fails or is cancelled."""

    def __init__(self, updates: WeightUpdates, update: _Update) -> None:
        self._updates, self._update = updates, update

    def __enter__(self) -> None:
        self._update.is_busy = True
        if self._update.expiry is not None:
            self._update.expiry.cancel()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._update.is_busy = False
        if error is None:
            self._updates.await_next_call(self._update)
            return
        is_late = isinstance(error, asyncio.CancelledError)
        fault = "it took longer than the server allows" if is_late else str(error)
        self._updates.drop(self._update, f"the last one was dropped: {fault}")
        if isinstance(error, WeightSyncError):
            raise ApiError(400, f"the weight update was dropped: {error}") from error
