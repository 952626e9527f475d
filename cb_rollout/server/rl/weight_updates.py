"""Weight updates over HTTP, in vLLM's four phases: init, start, update, finish.

Owns the single open update. It is staged and checked outside the model, then written during a pause
under a new policy version, or dropped without effect. Used on the server's asyncio thread; waits
and copies run on a separate thread.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

from cb_rollout.compat import fsdp as fsdp_compat
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import ConfigurationError, WeightSyncError
from cb_rollout.server.output_router import on_thread
from cb_rollout.server.protocol import ApiError, BroadcastUpdate, FileUpdate, InitInfo
from cb_rollout.server.rl.staged_weights import StagedWeights
from cb_rollout.server.rl.weight_group import WeightGroup, described
from cb_rollout.types import SyncReport
from cb_rollout.weights.adapters import has_adapters

InFlightName = Literal["keep", "recompute", "abort"]

Sync = Callable[..., SyncReport]


class WeightUpdates:
    """The weight updates of one served model; its methods raise `ApiError` for a refused call.

    `trained` is the model whose weights are written, plain or wrapped; `sync` starts a policy
    version with the new weights, during a pause. An open update is dropped after `timeout_seconds`
    without a call; a broadcast waits for the trainer for at most the same time. Raises
    `ConfigurationError` if the model is quantised, sharded or has adapters.
    """

    def __init__(
        self,
        manager: ContinuousBatchingManager,
        trained: torch.nn.Module,
        sync: Sync,
        timeout_seconds: float,
    ) -> None:
        self._manager = manager
        self._sync = sync
        self._seconds = timeout_seconds
        facts = ModelFacts.of(trained)
        self._model = facts.module
        is_plain = not (facts.is_quantized or has_adapters(self._model))
        if not is_plain or fsdp_compat.is_sharded(trained):
            raise ConfigurationError(
                "allow_weight_updates: the model is quantised, sharded or has adapters, so its "
                "tensors differ from those that a trainer sends; serve a plain model."
            )
        self._thread = ThreadPoolExecutor(1, "cb_rollout-weights")
        self._run = partial(on_thread, self._thread)
        self._open: StagedWeights | None = None
        # Drops the open update if no next call comes; None while a call runs, or if none is open.
        self._expiry: asyncio.TimerHandle | None = None
        self._group: WeightGroup | None = None
        # Why no update is open, for the error of a trainer's next call.
        self._fault = "none was begun"
        # Names that a failed write may have left half written.
        self._half_written: set[str] = set()
        self.weight_version: str | None = None
        """The trainer's own name for the current weights; None: the trainer gave no name."""

    def stop(self) -> None:
        self._drop("the server ends")
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def init(self, info: InitInfo) -> None:
        """Join a trainer's process group; without an address, the trainer sends files instead."""
        self._refuse_second()
        has_address = info.master_address is not None and info.master_port is not None
        if has_address and (info.backend != "gloo" or info.packed):
            raise ApiError(
                400,
                "this server receives weights over gloo, one tensor at a time, or from files, but "
                'not over NCCL; set backend to "gloo" in init_info, without packed, or send '
                "weight_dir.",
                "init_info",
            )
        self._group = None
        if has_address:
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

    async def shutdown(self) -> None:
        self._refuse_second()
        self._group = None

    def start(self, is_partial: bool) -> str:
        """Begin an update, and return its id; `is_partial`: unsent tensors keep their values."""
        self._refuse_second()
        self._open = StagedWeights(self._model, is_partial)
        self._expire_later()
        return self._open.update_id

    async def add(self, info: FileUpdate | BroadcastUpdate, update_id: str | None) -> int:
        """Stage tensors, and return the number staged so far."""
        with self._call(update_id) as staged:
            if isinstance(info, FileUpdate):
                paused = self._manager.loop.paused
                await self._run(staged.add_files, info.weight_dir, paused)
            else:
                await self._run(self._receive, staged, info)
        return len(staged.tensors)

    async def finish(
        self, update_id: str | None, in_flight: InFlightName, weight_version: str | None
    ) -> dict[str, Any]:
        """Write the staged tensors under a new policy version, and return a report.

        `in_flight` says what happens to unfinished sequences, as in `sync_weights`;
        `weight_version` is the trainer's own name for the weights.
        """
        # A write cannot be interrupted: if the caller stops waiting, the write still finishes.
        return await asyncio.shield(self._finish(update_id, in_flight, weight_version))

    async def _finish(
        self, update_id: str | None, in_flight: InFlightName, weight_version: str | None
    ) -> dict[str, Any]:
        with self._call(update_id) as staged:
            staged.require_whole(self._half_written)
            report = await self._run(self._write, staged, in_flight)
        self._close("the last one is finished")
        self.weight_version = weight_version
        return {
            "policy_version": report.policy_version,
            "num_tensors": len(staged.tensors),
            "num_bytes": sum(tensor.nbytes for tensor in staged.tensors.values()),
            "seconds": report.seconds,
        }

    async def replace(self, weight_dir: str) -> dict[str, Any]:
        """Start, update and finish in one call, from files."""
        update_id = self.start(is_partial=False)
        await self.add(FileUpdate(weight_dir=weight_dir), update_id)
        return await self.finish(update_id, "recompute", None)

    @contextmanager
    def _call(self, update_id: str | None) -> Iterator[StagedWeights]:
        """Run one call of the open update; drop the update if the call fails or is cancelled."""
        update = self._open
        if update is None or update_id not in (None, update.update_id):
            fault = self._fault if update is None else "another trainer's is"
            raise ApiError(
                409,
                f"no such weight update is open ({fault}); the weights are those of policy version "
                f"{self._manager.policy_version}.",
            )
        if self._expiry is None:
            raise ApiError(409, "another call of this weight update still runs.")
        self._expiry.cancel()
        self._expiry = None
        try:
            yield update
        except BaseException as error:
            is_late = isinstance(error, asyncio.CancelledError)
            fault = "it took longer than the server allows" if is_late else str(error)
            self._drop(f"the last one was dropped: {fault}")
            if isinstance(error, WeightSyncError):
                raise ApiError(400, f"the weight update was dropped: {error}") from error
            raise
        self._expire_later()

    def _expire_later(self) -> None:
        fault = f"it waited longer than {self._seconds:g} s for its next call"
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(self._seconds, self._drop, fault)

    def _drop(self, fault: str) -> None:
        """Drop the open update; the weights stay as they are."""
        self._close(fault)
        # A trainer that is still broadcasting gets an error, not a receiver of another update.
        self._group = None

    def _close(self, fault: str) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._open = None
        self._expiry = None
        self._fault = fault

    def _receive(self, staged: StagedWeights, info: BroadcastUpdate) -> None:
        tensors = described(info.names, info.dtype_names, info.shapes)
        staged.require_fit(tensors)
        if self._group is None:
            raise WeightSyncError(
                "no group was joined; call /init_weight_transfer_engine with its address first."
            )
        staged.add(self._group.receive(tensors))

    def _write(self, staged: StagedWeights, in_flight: InFlightName) -> SyncReport:
        with self._manager.paused(in_flight):
            self._half_written |= staged.tensors.keys()
            try:
                staged.write()
                report = self._sync(in_flight)
            except BaseException:
                # No token may be sampled from a mixture of old and new weights.
                self._manager.loop.hold(PauseReason.UPDATE)
                raise
            self._half_written = set()
            self._manager.pauses.release(PauseReason.UPDATE)
        return report

    def _refuse_second(self) -> None:
        if self._open is not None:
            raise ApiError(
                409,
                f"another weight update is open; finish it first. It is dropped {self._seconds:g} "
                "s after its last call.",
            )
