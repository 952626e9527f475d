"""Call the tools of a trainer's conversations at the same time.

TRL 1.16 calls one tool after the other, for all conversations of a turn (`_tool_call_loop`). While
that loop runs, its tools are replaced: the first call of a turn makes those of all conversations,
each conversation's in TRL's order, and every call returns its own result. Called by the trainer, on
its thread; by an asynchronous trainer's conversations, on their event loop. Imports no trl.
"""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from cb_rollout.errors import ToolTimeoutError

# A tool by name, as TRL keeps them for each conversation.
Tools = Mapping[str, Callable[..., Any]]


class DaemonThreads(Executor):
    """An executor with a thread for each call: one that hangs holds up no other, and no exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        run = partial(contextvars.copy_context().run, fn, *args, **kwargs)

        def call() -> None:
            try:
                future.set_result(run())
            except BaseException as error:  # noqa: BLE001  the waiting thread raises it
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=call, name="cb_rollout tool", daemon=True).start()
        return future


async def call_tool(
    name: str,
    tool: Callable[..., Any],
    arguments: Mapping[str, Any],
    timeout_seconds: float | None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Any:
    """Call a tool in a thread of its own; a coroutine function on its `loop`.

    Raises:
        ToolTimeoutError: the call took too long; a thread may still run, a coroutine is cancelled.
        Exception: whatever the tool raised.
    """
    if loop is None:
        call = DaemonThreads().submit(tool, **arguments)
    else:
        call = asyncio.run_coroutine_threadsafe(tool(**arguments), loop)
    running = asyncio.wrap_future(call)
    done, _ = await asyncio.wait({running}, timeout=timeout_seconds)
    if not done:
        running.cancel()
        raise ToolTimeoutError(
            f"the tool {name} took longer than tool_timeout_seconds={timeout_seconds:g}."
        )
    if running.cancelled():
        # By a client of its own, inside of the tool: the other calls go on.
        raise RuntimeError(f"the tool {name} was cancelled.")
    return running.result()


def abandon(environments: Iterable[Any], pools: Mapping[Any, list[Any]]) -> None:
    """Take environments in which a call still runs out of TRL's pools, for new ones."""
    for pool in pools.values():
        pool[:] = [own for own in pool if all(own is not hung for hung in environments)]


class ConcurrentTools:
    """Replaces the `_tool_call_loop` of a TRL trainer that has tools or environments."""

    def __init__(self, trainer: Any, timeout_seconds: float | None) -> None:
        self._trainer, self._timeout_seconds = trainer, timeout_seconds
        self._loop = trainer._tool_call_loop

    def run(self, *arguments: Any, **named: Any) -> Any:
        trainer = self._trainer
        # The loop appends to these lists, so a turn's calls can be read from them.
        self._completions = named["completions"] if "completions" in named else arguments[3]
        sync_tools, async_tools = trainer._sync_tool_dicts, trainer._async_tool_dicts
        self._tools: list[tuple[Tools, Tools]] = list(zip(sync_tools, async_tools, strict=True))
        self._answered: dict[int, dict[str, Any]] = {}
        self._answers: dict[int, tuple[deque[Future[Any]], deque[Future[Any]]]] = {}
        """Results and exceptions of a conversation's functions and coroutine functions."""
        self._hung: dict[int, ToolTimeoutError] = {}
        """By conversations of which no tool is called any more: a thread may be inside."""
        trainer._sync_tool_dicts, trainer._async_tool_dicts = (
            [dict.fromkeys(tools, partial(take, index)) for index, tools in enumerate(all_tools)]
            for take, all_tools in ((self._result, sync_tools), (self._awaitable, async_tools))
        )
        try:
            return self._loop(*arguments, **named)
        finally:
            trainer._sync_tool_dicts, trainer._async_tool_dicts = sync_tools, async_tools
            if environments := getattr(trainer, "environments", None):
                abandon([environments[index] for index in self._hung], trainer._environment_pool)

    def _result(self, index: int, **_: Any) -> Any:
        return self._next_answer(index, is_async=False).result()

    def _awaitable(self, index: int, **_: Any) -> Any:
        # Taken here and not in the coroutine, so that results keep the order of the calls.
        answer = self._next_answer(index, is_async=True)

        async def awaited() -> Any:
            return answer.result()

        return awaited()

    def _next_answer(self, index: int, *, is_async: bool) -> Future[Any]:
        """Take an answer of a conversation; the first of a turn makes the calls of all."""
        if self._answered.get(index) is not self._completions[index][-1]:
            DaemonThreads().submit(asyncio.run, self._call_all()).result()
        return self._answers[index][is_async].popleft()

    async def _call_all(self) -> None:
        turns = []
        for index, messages in enumerate(self._completions):
            message = messages[-1] if messages else {}
            calls = message.get("tool_calls") if message.get("role") == "assistant" else None
            # A message whose results were too long stays the last one, and is not called again.
            if calls and self._answered.get(index) is not message:
                self._answered[index] = message
                turns.append(self._call_turn(index, calls))
        await asyncio.gather(*turns)

    async def _call_turn(self, index: int, calls: list[Any]) -> None:
        """Call functions one after the other, then coroutine functions together."""

        async def answer(loop: asyncio.AbstractEventLoop | None, *call: Any) -> Future[Any]:
            answered, limit = Future[Any](), self._timeout_seconds
            try:
                if index in self._hung:
                    raise self._hung[index]
                answered.set_result(await call_tool(*call, timeout_seconds=limit, loop=loop))
            except Exception as error:  # noqa: BLE001  the trainer's thread raises it
                if loop is None and isinstance(error, ToolTimeoutError):
                    self._hung[index] = error
                answered.set_exception(error)
            return answered

        sync_calls, async_calls = (_valid(calls, tools) for tools in self._tools[index])
        answers = [await answer(None, *call) for call in sync_calls]
        together = (answer(self._trainer.async_loop, *call) for call in async_calls)
        self._answers[index] = deque(answers), deque(await asyncio.gather(*together))


def _valid(calls: list[Any], tools: Tools) -> list[tuple[Any, ...]]:
    """Return name, tool and arguments of the calls that the trainer will make, in order."""
    functions = [call.get("function", {}) for call in calls if call.get("type") == "function"]
    return [
        (name, tools[name], arguments)
        for function in functions
        if (name := function.get("name", "")) in tools
        and isinstance(arguments := function.get("arguments"), Mapping)
    ]
