"""Call the tools of a trainer's conversations at the same time.

TRL 1.16 calls one tool after the other, for all conversations of a turn (`_tool_call_loop`). While
that loop runs, its tools are replaced: the first call of a turn starts those of all conversations,
each conversation in a thread of its own and in TRL's order, and every call returns its own result.
Called by the trainer, on its thread. Imports no trl.
"""

import asyncio
import contextvars
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from cb_rollout.errors import ToolTimeoutError

# A tool by name, as TRL keeps them for each conversation.
Tools = Mapping[str, Callable[..., Any]]


class PendingCall(NamedTuple):
    """A call that a model wrote."""

    name: str
    tool: Callable[..., Any]
    arguments: Mapping[str, Any]


class ConversationTurn:
    """The tool calls of one conversation in one turn, made by a thread of their own."""

    def __init__(
        self,
        sync_calls: list[PendingCall],
        async_calls: list[PendingCall],
        async_loop: asyncio.AbstractEventLoop | None,
        timeout_seconds: float | None,
    ) -> None:
        """Start the calls: `sync_calls` one after the other, then `async_calls` together.

        `timeout_seconds`: longest time of each call; None: unlimited.
        """
        self.is_hung = False
        """True once a call took too long; its thread may still run."""
        self._async_loop, self._timeout_seconds = async_loop, timeout_seconds
        self._sync_calls = [(call, Future[Any]()) for call in sync_calls]
        self._async_calls = [(call, Future[Any]()) for call in async_calls]
        self._results = {
            False: deque(result for _, result in self._sync_calls),
            True: deque(result for _, result in self._async_calls),
        }
        self._begin("")
        run = partial(contextvars.copy_context().run, self._run)
        # A daemon: a tool that never returns must not keep the interpreter alive.
        threading.Thread(target=run, name="cb_rollout tools", daemon=True).start()

    def take(self, *, is_async: bool) -> Future[Any]:
        """Wait for the next result of the sync or async calls, in the order of the calls."""
        while not self.is_hung:
            result = self._results[is_async][0]
            if result.done():
                return self._results[is_async].popleft()
            remaining = self._running[1] - time.monotonic()
            self.is_hung = remaining <= 0
            wait([result], None if remaining == math.inf else max(0, remaining))
        hung: Future[Any] = Future()
        hung.set_exception(self._timeout_error(self._running[0]))
        return hung

    def _begin(self, name: str) -> None:
        limit = math.inf if self._timeout_seconds is None else self._timeout_seconds
        self._running = (name, time.monotonic() + limit)
        """Name of the running call, and when it will have taken too long."""

    def _run(self) -> None:
        for call, result in self._sync_calls:
            if self.is_hung:
                return
            self._begin(call.name)
            try:
                result.set_result(call.tool(**call.arguments))
            except BaseException as error:  # noqa: BLE001  the trainer's thread raises it
                result.set_exception(error)
        if self._async_calls and not self.is_hung:
            # The event loop keeps the time of these, and cancels them.
            self._running = ("", math.inf)
            assert self._async_loop is not None
            try:
                asyncio.run_coroutine_threadsafe(self._gather(), self._async_loop).result()
            except BaseException as error:  # noqa: BLE001  the trainer's thread raises it
                for _, result in self._async_calls:
                    if not result.done():
                        result.set_exception(error)

    async def _gather(self) -> None:
        await asyncio.gather(*(self._await(*call) for call in self._async_calls))

    async def _await(self, call: PendingCall, result: Future[Any]) -> None:
        limit = asyncio.timeout(self._timeout_seconds)
        try:
            async with limit:
                result.set_result(await call.tool(**call.arguments))
        except asyncio.CancelledError:
            # Cancelled inside of the tool, by a client of its own: the other calls go on.
            result.set_exception(RuntimeError(f"the tool {call.name} was cancelled."))
        except Exception as error:  # noqa: BLE001  the trainer's thread raises it
            has_expired = limit.expired()
            result.set_exception(self._timeout_error(call.name) if has_expired else error)

    def _timeout_error(self, name: str) -> ToolTimeoutError:
        return ToolTimeoutError(
            f"the tool {name} took longer than tool_timeout_seconds={self._timeout_seconds:g}."
        )


class ConcurrentTools:
    """Replaces the `_tool_call_loop` of a TRL trainer that has tools or environments."""

    def __init__(self, trainer: Any, timeout_seconds: float | None) -> None:
        self._trainer, self._timeout_seconds = trainer, timeout_seconds
        self._loop = trainer._tool_call_loop
        self._completions: list[list[dict[str, Any]]] = []
        self._tools: list[tuple[Tools, Tools]] = []
        self._turns: dict[int, ConversationTurn] = {}
        self._answered: dict[int, dict[str, Any]] = {}

    def run(self, *arguments: Any, **named: Any) -> Any:
        trainer = self._trainer
        # The loop appends to these lists, so a turn's calls can be read from them.
        self._completions = named["completions"] if "completions" in named else arguments[3]
        sync_tools, async_tools = trainer._sync_tool_dicts, trainer._async_tool_dicts
        self._tools = list(zip(sync_tools, async_tools, strict=True))
        self._turns, self._answered = {}, {}
        trainer._sync_tool_dicts, trainer._async_tool_dicts = (
            [dict.fromkeys(tools, partial(take, index)) for index, tools in enumerate(all_tools)]
            for take, all_tools in ((self._result, sync_tools), (self._awaitable, async_tools))
        )
        try:
            return self._loop(*arguments, **named)
        finally:
            trainer._sync_tool_dicts, trainer._async_tool_dicts = sync_tools, async_tools
            self._abandon_hung_environments()
            self._completions, self._tools, self._turns, self._answered = [], [], {}, {}

    def _result(self, index: int, **_: Any) -> Any:
        return self._turn(index).take(is_async=False).result()

    def _awaitable(self, index: int, **_: Any) -> Any:
        # Taken here and not in the coroutine, so that results keep the order of the calls.
        result = self._turn(index).take(is_async=True)

        async def awaited() -> Any:
            return result.result()

        return awaited()

    def _turn(self, index: int) -> ConversationTurn:
        """Return the running calls of a conversation; start those of all at a turn's first call."""
        if self._answered.get(index) is not self._completions[index][-1]:
            self._start_turn()
        return self._turns[index]

    def _start_turn(self) -> None:
        for index, messages in enumerate(self._completions):
            message = messages[-1] if messages else {}
            calls = message.get("tool_calls") if message.get("role") == "assistant" else None
            # A message whose results were too long stays the last one, and is not called again.
            if not calls or self._answered.get(index) is message:
                continue
            self._answered[index] = message
            sync_tools, async_tools = self._tools[index]
            sync_calls, async_calls = _valid(calls, sync_tools), _valid(calls, async_tools)
            is_hung = index in self._turns and self._turns[index].is_hung
            # The earlier call may still be inside the environment.
            if (sync_calls or async_calls) and not is_hung:
                loop = self._trainer.async_loop if async_calls else None
                self._turns[index] = ConversationTurn(
                    sync_calls, async_calls, loop, self._timeout_seconds
                )

    def _abandon_hung_environments(self) -> None:
        """Take environments whose tool still runs out of the trainer's pool, for new ones."""
        environments = getattr(self._trainer, "environments", None)
        hung = [index for index, turn in self._turns.items() if turn.is_hung]
        if not environments or not hung:
            return
        for pool in self._trainer._environment_pool.values():
            pool[:] = [e for e in pool if all(e is not environments[index] for index in hung)]


def _valid(calls: list[Any], tools: Tools) -> list[PendingCall]:
    """Return the calls that the trainer will make of these tools, in order."""
    functions = [call.get("function", {}) for call in calls if call.get("type") == "function"]
    return [
        PendingCall(name, tools[name], arguments)
        for function in functions
        if (name := function.get("name", "")) in tools
        and isinstance(arguments := function.get("arguments"), Mapping)
    ]
