"""Pause, resume and abort on a client's behalf; used on the server's asyncio thread.

Waits for the engine on a thread of its own, so that a pause delays no stream.
"""

import asyncio
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.server.output_router import OutputRouter
from cb_rollout.server.rl.bodies import PauseMode


class EngineControl:
    """Clients' control of one engine.

    Args:
        manager: the engine's.
    """

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        self._manager = manager
        self._thread = ThreadPoolExecutor(1, "cb_rollout-control")
        self._num_draining = 0
        # Makes a hold take effect either before a release or never.
        self._lock = threading.Lock()
        self._awaited_pauses: set[object] = set()
        self._changed = asyncio.Condition()

    def start(self, router: OutputRouter) -> None:
        """Begin with the router of the server's requests."""
        self._router = router

    def stop(self) -> None:
        """End the thread, and a client's pause, so that the engine goes on without the server."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._awaited_pauses.clear()
            self._manager.pauses.release(PauseReason.CLIENT)

    @property
    def is_paused(self) -> bool:
        """Return whether a client paused the engine."""
        return PauseReason.CLIENT in self._manager.pauses.reasons

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling until `resume`; later requests wait.

        Args:
            mode: fate of the requests in flight. "abort": answer them with the tokens that they
                have; "wait": let them end first; "keep": they go on after `resume`.
        """
        # Requests of an engine that is held already would not end.
        if mode == "wait" and not self._manager.pauses.reasons:
            await self._drain()
        if mode == "abort":
            self._router.abort(None)
        await self._hold()
        await self._run(self._manager.loop.deliver_cancelled)

    async def _hold(self) -> None:
        """Hold the engine, unless this wait is given up before."""
        pause = object()
        self._awaited_pauses.add(pause)
        try:
            await self._run(partial(self._hold_if_awaited, pause))
        finally:
            with self._lock:
                self._awaited_pauses.discard(pause)

    def _hold_if_awaited(self, pause: object) -> None:
        with self._manager.loop.paused(), self._lock:
            if pause in self._awaited_pauses:
                self._manager.pauses.hold(PauseReason.CLIENT)

    async def _drain(self) -> None:
        """Wait for the requests in flight, and hold back those that come meanwhile."""
        self._num_draining += 1
        try:
            await self._router.drained()
            await self._hold()
        finally:
            self._num_draining -= 1
            async with self._changed:
                self._changed.notify_all()

    async def may_submit(self) -> None:
        """Wait while a pause waits for earlier requests."""
        if self._num_draining:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._num_draining)

    async def resume(self) -> None:
        """End a client's pause; nothing happens without one."""
        with self._lock:
            self._manager.pauses.release(PauseReason.CLIENT)

    async def abort(self, client_ids: Collection[str] | None) -> int:
        """End requests by their clients' names, all for None; return their number."""
        count = self._router.abort(client_ids)
        await self._run(self._manager.loop.deliver_cancelled)
        return count

    async def _run(self, call: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, call)
