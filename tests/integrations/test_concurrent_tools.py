"""TRL's own loop of tool calls, over conversations whose tools must all be inside at once."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from trl import GRPOTrainer
from trl.trainer import grpo_trainer as grpo

from cb_rollout import ConfigurationError, RolloutConfig, ToolTimeoutError
from cb_rollout.integrations.concurrent_tools import ConcurrentTools

# Far longer than any wait that succeeds.
PATIENCE = 60


def calls_of(*names_and_arguments):
    return [
        {"type": "function", "function": {"name": name, "arguments": arguments}}
        for name, arguments in names_and_arguments
    ]


class Loop:
    """TRL's `_tool_call_loop` on scripted turns: what the model would write, turn by turn."""

    def __init__(self, turns, tools, monkeypatch, environments=None, overlong=()):
        self.turns, self.overlong = iter(turns[1:]), overlong
        count = len(turns[0])
        self.messages = [[{"role": "assistant", "tool_calls": calls}] for calls in turns[0]]
        is_async = asyncio.iscoroutinefunction
        own = [tools(index) for index in range(count)]
        self.async_loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.async_loop.run_forever, daemon=True)
        self.thread.start()
        self.trainer = SimpleNamespace(
            _sync_tool_dicts=[{n: t for n, t in d.items() if not is_async(t)} for d in own],
            _async_tool_dicts=[{n: t for n, t in d.items() if is_async(t)} for d in own],
            async_loop=self.async_loop,
            environments=environments,
            _environment_pool={None: list(environments or [])},
            environment_factories=None,
            tools=["any"],
            max_tool_calling_iterations=len(turns),
            max_completion_length=10,
            use_vllm=False,
            _is_vlm=False,
            model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=100)),
            _tokenizer=None,
            _get_tool_suffix_ids=self.suffix,
            _generate_single_turn=self.generate,
        )
        self.trainer._tool_call_loop = GRPOTrainer._tool_call_loop.__get__(self.trainer)
        monkeypatch.setattr(grpo, "parse_response", lambda *_, **__: next(self.answers))

    def suffix(self, messages):
        return [7] * (50 if any(m["content"] in self.overlong for m in messages) else 1)

    def generate(self, prompt_ids, *_, **__):
        turn = next(self.turns)
        calls = turn if isinstance(turn, list) else [turn] * len(prompt_ids)
        assert len(calls) == len(prompt_ids)
        self.answers = iter([{"role": "assistant", "content": "", "tool_calls": c} for c in calls])
        return [[5]] * len(prompt_ids), None

    def run(self, timeout_seconds=None, *, is_concurrent=True):
        count = len(self.messages)
        run = self.trainer._tool_call_loop
        if is_concurrent:
            run = ConcurrentTools(self.trainer, timeout_seconds).run
        prompts = [[{"role": "user", "content": "?"}] for _ in range(count)]
        ids = [[1] for _ in range(count)], [[2] for _ in range(count)]
        try:
            result = run(prompts, *ids, self.messages, None, None, {})
        finally:
            # What was cancelled has ended by then.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.async_loop).result()
            self.async_loop.call_soon_threadsafe(self.async_loop.stop)
            self.thread.join()
            self.async_loop.close()
        return result[4], result[5]

    def said(self):
        """What the tools of each conversation answered, in order."""
        return [[m["content"] for m in own if m["role"] == "tool"] for own in self.messages]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_tools_of_64_conversations_are_inside_at_once(kind, monkeypatch):
    inside = threading.Barrier(64)

    def tools(index):
        def meet(number):
            inside.wait(PATIENCE)
            return number + index

        async def meet_later(number):
            await asyncio.get_running_loop().run_in_executor(pool, inside.wait, PATIENCE)
            return number + index

        return {"meet": meet if kind == "sync" else meet_later}

    with ThreadPoolExecutor(64) as pool:
        turn = [calls_of(("meet", {"number": 100})) for _ in range(64)]
        loop = Loop([turn, turn, None], tools, monkeypatch)
        assert loop.run() == (128, 0)
    assert loop.said() == [[str(100 + index)] * 2 for index in range(64)]


def test_a_tool_that_raises_costs_its_own_conversation_alone(monkeypatch):
    def tools(index):
        def divide(number):
            return number // index

        return {"divide": divide}

    loop = Loop([[calls_of(("divide", {"number": 6}))] * 3, None], tools, monkeypatch)
    assert loop.run() == (3, 1)
    zero = "{'error': 'integer division or modulo by zero'}"
    assert loop.said() == [[zero], ["6"], ["3"]]


def test_a_tool_that_hangs_costs_its_own_conversation_alone(monkeypatch):
    never, num_calls = threading.Event(), 0
    environments = [object() for _ in range(3)]

    def tools(index):
        def wait(number):
            nonlocal num_calls
            if index == 1:
                num_calls += 1
                never.wait(PATIENCE)
            return number

        return {"wait": wait}

    turn = [calls_of(("wait", {"number": 4}))] * 3
    loop = Loop([turn, turn, None], tools, monkeypatch, environments)
    try:
        assert loop.run(timeout_seconds=0.05) == (6, 2)
    finally:
        never.set()
    error = "{'error': 'the tool wait took longer than tool_timeout_seconds=0.05.'}"
    assert loop.said() == [["4", "4"], [error, error], ["4", "4"]]
    # Its environment is never entered again, by this conversation or another.
    assert num_calls == 1
    assert loop.trainer._environment_pool == {None: [environments[0], environments[2]]}


def test_a_coroutine_that_is_cancelled_inside_costs_its_own_conversation_alone(monkeypatch):
    def tools(index):
        async def fetch(number):
            if index:
                raise asyncio.CancelledError
            return number

        return {"fetch": fetch}

    loop = Loop([[calls_of(("fetch", {"number": 4}))] * 2, None], tools, monkeypatch)
    assert loop.run(timeout_seconds=PATIENCE) == (2, 1)
    assert loop.said() == [["4"], ["{'error': 'the tool fetch was cancelled.'}"]]


def test_a_coroutine_that_hangs_is_cancelled(monkeypatch):
    cancelled = []

    def tools(index):
        async def wait(number):
            try:
                await asyncio.sleep(PATIENCE if index else 0)
            except asyncio.CancelledError:
                cancelled.append(index)
                raise
            return number

        return {"wait": wait}

    loop = Loop([[calls_of(("wait", {"number": 4}))] * 2, None], tools, monkeypatch)
    assert loop.run(timeout_seconds=0.05) == (2, 1)
    assert cancelled == [1]
    assert loop.said()[0] == ["4"]
    assert issubclass(ToolTimeoutError, TimeoutError)


@pytest.mark.parametrize("is_concurrent", [True, False])
def test_calls_are_answered_as_trl_answers_them(is_concurrent, monkeypatch):
    """Unknown tools, bad arguments, several calls of both kinds, and results that are too long."""
    log = [[] for _ in range(4)]

    def tools(index):
        def add(number):
            log[index].append(number)
            return number if index != 3 else "long"

        async def later(number):
            return -number

        return {"add": add, "later": later}

    first = [
        calls_of(("later", {"number": 1}), ("add", {"number": 2}), ("add", {"number": 3})),
        calls_of(("unknown", {}), ("add", "no mapping"), ("add", {"wrong": 1})),
        None,
        calls_of(("add", {"number": 9})),
    ]
    second = [calls_of(("add", {"number": 4})), calls_of(("add", {"number": 5}))]
    loop = Loop([first, second, None], tools, monkeypatch, overlong=("long",))
    assert loop.run(is_concurrent=is_concurrent) == (9, 3)
    assert log == [[2, 3, 4], [5], [], [9]]
    said = loop.said()
    assert said[0] == ["2", "3", "-1", "4"]
    assert said[1][0] == "{'error': 'Tool unknown not found.'}"
    assert [len(own) for own in said] == [4, 4, 0, 0]


# Arguments that tools have, and those that a model writes.
ODD_CALLS = {
    "an argument named index": [("fetch", {"index": 1}), ("fetch", {"index": 2})],
    "an argument named self": [("seen", {"self": 1}), ("seen", {"self": 2, "tool": 3})],
    "an argument that the tool has not": [("add", {"index": 1}), ("add", {"number": 2})],
    "no mapping": [("add", None), ("later", [1]), ("add", "number"), ("add", {"number": 2})],
    "numbers as names": [("add", {1: 2}), ("later", {1: 2}), ("add", {"number": 3})],
    "no arguments": [("add", {}), ("later", {}), ("add", {"number": 3})],
    "a coroutine's wrong arguments, first": [
        ("later", {"wrong": 1}),
        ("add", {"number": 2}),
        ("later", {"number": 3}),
    ],
    "a coroutine's wrong arguments, last": [
        ("later", {"number": 1}),
        ("add", {"number": 2}),
        ("later", {"wrong": 3}),
    ],
    "a coroutine that raises a TypeError": [("later", {"number": None}), ("add", {"number": 2})],
    "a name that is a list": [(["add"], {"number": 1}), ("add", {"number": 2})],
    "an iterator at its end": [("pop", {"number": 1}), ("add", {"number": 2})],
    "an iterator that ends with a text": [("end", {"text": "over"}), ("add", {"number": 2})],
    "a coroutine's iterator at its end": [("pop_later", {"number": 1}), ("add", {"number": 2})],
}


def odd_tools(index):
    def fetch(index):
        return index * 10

    def seen(**named):
        return named

    def add(number):
        return number + index

    async def later(number):
        return -number

    def pop(number):
        return next(iter(()))

    def end(text):
        raise StopIteration(text)

    async def pop_later(number):
        return next(iter(()))

    tools = (fetch, seen, add, later, pop, end, pop_later)
    return {tool.__name__: tool for tool in tools}


@pytest.mark.parametrize("name", ODD_CALLS)
def test_whatever_a_model_writes_is_answered_as_trl_answers_it(name, monkeypatch):
    answers = []
    for is_concurrent in (False, True):
        turn = [calls_of(*ODD_CALLS[name])] * 2
        loop = Loop([turn, turn, None], odd_tools, monkeypatch)
        counts = loop.run(timeout_seconds=PATIENCE / 10, is_concurrent=is_concurrent)
        answers.append((counts, loop.said()))
    assert answers[1] == answers[0]
    (num_calls, num_failures), said = answers[0]
    assert num_calls == 4 * len(ODD_CALLS[name])
    assert num_failures < num_calls
    assert len(said[0]) == 2 * len(ODD_CALLS[name])


def test_a_timeout_needs_threads():
    with pytest.raises(ConfigurationError, match="set concurrent_tools=True"):
        RolloutConfig(tool_timeout_seconds=3, concurrent_tools=False)
