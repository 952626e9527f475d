"""Call the tools of a trainer's conversations at the same time.

TRL 1.16 calls one tool after the other, for all conversations of a turn (`_tool_call_loop`). While
that loop runs, its tools are replaced: the first call of a turn makes the calls of all
conversations, each conversation's in TRL's order, and every call returns its own result. Called by
the trainer, on its thread, or by an asynchronous trainer's conversations, on their event loop. Does
not import trl.
"""

import asyncio
import contextvars
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor, Future
from functools import partial, wraps
from typing import Any, NamedTuple

from cb_rollout.errors import ToolTimeoutError
from cb_rollout.metrics.observer import observer

# A tool by name, as TRL keeps them for each conversation.
Tools = Mapping[str, Callable[..., Any]]


class DaemonThreads(Executor):
    """An executor with one daemon thread per call, so a hanging call blocks nothing else."""

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


class StoppedIterationError(RuntimeError):
    """Stands for a tool's `StopIteration`, with its text.

    An asyncio future cannot raise `StopIteration`; a waiting task would wait forever.
    """


def _called(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return tool(**arguments)
    except StopIteration as error:
        raise StoppedIterationError(str(error)) from error


async def call_tool(
    name: str,
    tool: Callable[..., Any],
    arguments: Mapping[str, Any],
    timeout_seconds: float | None,
    loop: asyncio.AbstractEventLoop | None = None,
) -> Any:
    """Call a tool: a function in a new thread, a coroutine function on its event loop.

    Args:
        name: the tool's name, for spans and errors.
        tool: a function, or a coroutine function.
        arguments: the tool's arguments, by name.
        timeout_seconds: maximum duration of the call; None: no limit.
        loop: event loop for a coroutine function; None: `tool` is a function.

    Raises:
        ToolTimeoutError: the call took too long; a thread may still run, a coroutine is cancelled.
        StoppedIterationError: the tool raised `StopIteration`.
        Exception: any other exception of the tool.
    """
    with observer().span(f"execute_tool {name}", tool=name):
        if loop is None:
            call = DaemonThreads().submit(_called, tool, arguments)
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
            # Something inside the tool, such as its client, cancelled it. The other calls go on.
            raise RuntimeError(f"the tool {name} was cancelled.")
        return running.result()


def abandon(environments: Iterable[Any], pools: Mapping[Any, list[Any]]) -> None:
    """Remove environments with a running call from TRL's pools, which create new ones."""
    hung = {id(environment) for environment in environments}
    for pool in pools.values():
        pool[:] = [environment for environment in pool if id(environment) not in hung]


class Answers(NamedTuple):
    """Results and exceptions of a turn's calls, in the order in which TRL asks for them."""

    of_functions: deque[Future[Any]]
    of_coroutine_functions: deque[Future[Any]]


class Call(NamedTuple):
    """A tool call of a model."""

    name: str
    tool: Callable[..., Any]
    arguments: Mapping[str, Any]


class ConcurrentTools:
    """Replaces the `_tool_call_loop` of a TRL trainer that has tools or environments."""

    def __init__(self, trainer: Any, timeout_seconds: float | None) -> None:
        self._trainer = trainer
        self._timeout_seconds = timeout_seconds
        self._loop = trainer._tool_call_loop

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Run TRL's loop with these arguments, and with its tools replaced."""
        trainer = self._trainer
        # The loop appends to these lists, so a turn's calls can be read from them.
        self._completions = named["completions"] if "completions" in named else arguments[3]
        self._functions: list[Tools] = trainer._sync_tool_dicts
        self._coroutine_functions: list[Tools] = trainer._async_tool_dicts
        self._answered: dict[int, dict[str, Any]] = {}
        """The last message of each conversation whose calls were made."""
        self._answers: dict[int, Answers] = {}
        self._hung: dict[int, ToolTimeoutError] = {}
        """By the conversation, whose tools are no longer called: a thread may still run in one."""
        trainer._sync_tool_dicts = _replaced(self._functions, self._result)
        trainer._async_tool_dicts = _replaced(self._coroutine_functions, self._awaitable)
        try:
            return self._loop(*arguments, **named)
        finally:
            trainer._sync_tool_dicts = self._functions
            trainer._async_tool_dicts = self._coroutine_functions
            environments = getattr(trainer, "environments", None)
            if environments:
                abandon([environments[index] for index in self._hung], trainer._environment_pool)

    def _result(self, index: int, *_: Any) -> Any:
        """Return the next result of a conversation's functions, or raise their exception."""
        return self._answers_of(index).of_functions.popleft().result()

    def _awaitable(
        self, index: int, tool: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        """Return a coroutine of the next result of a conversation's coroutine functions.

        Raises:
            TypeError: the tool makes no coroutine from these arguments. TRL then gets this error
                before the results of all coroutines.
        """
        # Taken here and not in the coroutine, so that results keep the order of the calls.
        answer = self._answers_of(index).of_coroutine_functions.popleft()
        error = answer.exception()
        if isinstance(error, TypeError) and not _takes(tool, arguments):
            raise error

        async def awaited() -> Any:
            return answer.result()

        return awaited()

    def _answers_of(self, index: int) -> Answers:
        """Return a conversation's answers; the first of a turn makes the calls of all."""
        if self._answered.get(index) is not self._completions[index][-1]:
            DaemonThreads().submit(asyncio.run, self._call_all()).result()
        return self._answers[index]

    async def _call_all(self) -> None:
        """Make the calls of every conversation whose last message has new ones."""
        turns: list[Coroutine[Any, Any, None]] = []
        for index, messages in enumerate(self._completions):
            if not messages or messages[-1].get("role") != "assistant":
                continue
            message = messages[-1]
            calls = message.get("tool_calls")
            # A message whose results were too long stays the last one, and is not called again.
            if calls and self._answered.get(index) is not message:
                self._answered[index] = message
                turns.append(self._call_turn(index, calls))
        await asyncio.gather(*turns)

    async def _call_turn(self, index: int, calls: list[Any]) -> None:
        """Call functions one after the other, then coroutine functions together."""
        of_functions: deque[Future[Any]] = deque()
        for call in _valid_calls(calls, self._functions[index]):
            of_functions.append(await self._answer(index, call, loop=None))
        together: list[Coroutine[Any, Any, Future[Any]]] = []
        for call in _valid_calls(calls, self._coroutine_functions[index]):
            together.append(self._answer(index, call, loop=self._trainer.async_loop))
        of_coroutine_functions = deque(await asyncio.gather(*together))
        self._answers[index] = Answers(of_functions, of_coroutine_functions)

    async def _answer(
        self, index: int, call: Call, loop: asyncio.AbstractEventLoop | None
    ) -> Future[Any]:
        """Return the result of a conversation's call, or its exception, as a done future."""
        answer: Future[Any] = Future()
        try:
            if index in self._hung:
                raise self._hung[index]
            result = await call_tool(
                name=call.name,
                tool=call.tool,
                arguments=call.arguments,
                timeout_seconds=self._timeout_seconds,
                loop=loop,
            )
            answer.set_result(result)
        except Exception as error:  # noqa: BLE001  the trainer's thread raises it
            if loop is None and isinstance(error, ToolTimeoutError):
                self._hung[index] = error
            answer.set_exception(error)
        return answer


def _replaced(
    tools_of_conversations: list[Tools], take: Callable[..., Any]
) -> list[dict[str, Callable[..., Any]]]:
    """Return conversations' tools, each replaced by `take` of the conversation's index."""
    replaced: list[dict[str, Callable[..., Any]]] = []
    for index, tools in enumerate(tools_of_conversations):
        stand_ins: dict[str, Callable[..., Any]] = {}
        for name, tool in tools.items():
            stand_ins[name] = _stand_in(tool, partial(take, index, tool))
        replaced.append(stand_ins)
    return replaced


def _stand_in(tool: Callable[..., Any], take: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that replaces a tool, with the tool's name for errors."""

    # A tool's arguments may have any names.
    @wraps(tool)
    def called(**arguments: Any) -> Any:
        return take(arguments)

    return called


def _takes(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    """Return whether a tool has parameters for these arguments."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError:
        return False
    return True


def _valid_calls(calls: list[Any], tools: Tools) -> list[Call]:
    """Return the calls of these tools that the trainer will make, in order."""
    valid: list[Call] = []
    for call in calls:
        if call.get("type") != "function":
            continue
        function = call.get("function", {})
        name = function.get("name", "")
        arguments = function.get("arguments")
        # A model may write anything; for all other calls, TRL itself raises.
        is_known = isinstance(name, str) and name in tools
        if is_known and _are_keywords(arguments):
            valid.append(Call(name, tools[name], arguments))
    return valid


def _are_keywords(arguments: Any) -> bool:
    """Return whether a function can be called with these arguments by name."""
    if not isinstance(arguments, Mapping):
        return False
    return all(isinstance(name, str) for name in arguments)
