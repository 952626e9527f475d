"""An interrupt or a fault at any place leaves a generator that works, or says that it is dead."""

import contextlib
import signal
import sys
import threading
from pathlib import Path

import pytest
from tiny import plain_logprobs, tiny_model

import cb_rollout
from cb_rollout import (
    ContinuousBatchingManager,
    EngineDeadError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.engine.core import Engine

PACKAGE = Path(cb_rollout.__file__).parent
GREEDY = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8, 9]]

# Seconds after which a wait that should have ended fails the test.
LONG = 30.0

# Python's own locks and context managers are interrupted as the package is.
ADMISSION_AND_DELIVERY = (
    *(PACKAGE / "engine" / "service").glob("*.py"),
    PACKAGE / "rollout" / "generator.py",
    PACKAGE / "engine" / "scheduler" / "scheduler.py",
    Path(threading.__file__),
    Path(contextlib.__file__),
)


class Tracer:
    """Calls `act` at the n-th event of a kind in these files, and counts the events."""

    def __init__(self, paths, event, act, at=None):
        self._names = {str(path) for path in paths}
        self._event, self._act, self._at = event, act, at
        self.count = 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in self._names:
            return None
        if event == self._event:
            self.count += 1
            if self.count == self._at:
                self._act()
        return self


def traced(call, tracer):
    before = sys.gettrace()

    # Python leaves an exception that was being handled set when a tracer interrupts its handler,
    # and every later error of the thread then shows it as its context. That of a generator goes
    # with the generator.
    def alone():
        yield call()

    sys.settrace(tracer)
    try:
        return next(alone())
    finally:
        sys.settrace(before)


def interrupt():
    signal.raise_signal(signal.SIGINT)


def generate(generator):
    return list(generator.generate_batch(PROMPTS, sampling_params=GREEDY).values())


def require_works(generator, expected):
    try:
        outputs = generate(generator)
    except EngineDeadError:
        outputs = generate(generator)
    assert [output.generated_tokens for output in outputs] == expected
    assert generator.manager.engine.num_blocks_used == 0
    assert not generator.manager.loop.is_live()
    assert generator.manager.model.training
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt_everywhere(generator, call, step=1):
    """Interrupt `call` at its every line (or each `step`-th one), and generate after each."""
    expected = [output.generated_tokens for output in generate(generator)]
    counted = Tracer(ADMISSION_AND_DELIVERY, "line", interrupt)
    traced(call, counted)
    # Another thread's turns may come between, and a call may have fewer lines or more.
    for number in range(1, counted.count + 1, step):
        with contextlib.suppress(KeyboardInterrupt, EngineDeadError):
            traced(call, Tracer(ADMISSION_AND_DELIVERY, "line", interrupt, number))
        require_works(generator, expected)
    generator.close()
    assert generator.manager.engine.status().kv_bytes == 0
    return counted.count


@pytest.fixture
def generator():
    model = tiny_model("llama", num_hidden_layers=1).train()
    with RolloutGenerator(model, RolloutConfig(seed=0, block_size=16)) as made:
        yield made


def test_an_interrupt_while_requests_are_admitted_loses_none_of_them(generator, monkeypatch):
    expected = [output.generated_tokens for output in generate(generator)]
    add = Engine.add

    def interrupted(self, request):
        monkeypatch.undo()
        interrupt()
        add(self, request)

    monkeypatch.setattr(Engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(generator)
    require_works(generator, expected)
    assert generator.manager.status().requests_waiting == 0


def test_an_interrupt_at_lines_of_a_rollout_leaves_a_generator_that_works(generator):
    interrupt_everywhere(generator, lambda: generate(generator), step=11)


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_rollout_leaves_a_generator_that_works(generator):
    assert interrupt_everywhere(generator, lambda: generate(generator)) > 500


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sync_weights", "close"])
def test_an_interrupt_at_any_line_of_a_call_leaves_a_generator_that_works(generator, name):
    assert interrupt_everywhere(generator, getattr(generator, name)) > 20


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_sleep_leaves_a_generator_that_works(generator):
    def sleep_and_wake():
        generator.sleep()
        generator.wake()

    assert interrupt_everywhere(generator, sleep_and_wake) > 20


@pytest.mark.slow
def test_an_interrupt_at_any_line_of_a_pause_leaves_a_generator_that_works(generator):
    def pause():
        with generator.manager.pause():
            pass

    assert interrupt_everywhere(generator, pause) > 20


class Killed(Exception):
    """Raised inside the engine's thread."""


def kill():
    raise Killed("here")


def run_once(manager, tracer):
    """Serve one request on a thread of its own under a tracer; return its output or the error."""
    threading.settrace(tracer)
    try:
        manager.start()
    finally:
        threading.settrace(None)
    try:
        manager.add_request([5, 6, 7], sampling_params=GREEDY)
        return manager.get_result(timeout=LONG)
    except EngineDeadError as error:
        return error


def kill_everywhere(step=1):
    model = tiny_model("llama", num_hidden_layers=1).train()
    manager = ContinuousBatchingManager(model, None, RolloutConfig(seed=0, block_size=16))
    paths = list(PACKAGE.rglob("*.py"))
    counted = Tracer(paths, "call", kill)
    expected = run_once(manager, counted)
    manager.stop()
    num_dead = 0
    # The first two calls are the thread's own functions, before it has a request.
    for number in range(3, counted.count + 1, step):
        found = run_once(manager, Tracer(paths, "call", kill, number))
        if isinstance(found, EngineDeadError):
            num_dead += 1
            assert isinstance(found.__cause__, Killed)
        else:
            assert found is not None, f"call {number}"
            assert found.error or found.generated_tokens == expected.generated_tokens
        manager.stop(timeout=0)
        assert (manager.engine.num_blocks_used, model.training) == (0, True), number
        again = run_once(manager, None)
        assert again is not None, f"call {number}: {found}"
        assert again.generated_tokens == expected.generated_tokens
        plain = plain_logprobs(model, [5, 6, 7], again.generated_tokens)
        assert again.logprobs == pytest.approx(plain, abs=1e-5)
        manager.stop()
    assert manager.engine.status().kv_bytes == 0
    return counted.count, num_dead


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fault_at_calls_of_the_engines_thread_is_told_to_every_waiting_thread():
    assert kill_everywhere(step=29)[1] > 0


# A generator that is closed on its deletion can raise to nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_fault_at_any_call_of_the_engines_thread_is_told_to_every_waiting_thread():
    num_calls, num_dead = kill_everywhere()
    assert num_calls > 200
    assert num_dead > 50


def test_ctrl_c_in_a_stop_that_waits_loses_no_request():
    is_stopping, is_seen = threading.Event(), threading.Event()
    calls_since = []

    def interrupting(_ids, scores):
        if is_stopping.is_set():
            calls_since.append(None)
            if len(calls_since) == 5:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                is_seen.wait(LONG)
        return scores

    params = SamplingParams(
        max_new_tokens=60, ignore_eos=True, logits_processors=(interrupting,), seed=0
    )
    manager = ContinuousBatchingManager(tiny_model())
    manager.start()
    request_id = manager.add_request(PROMPTS[0], sampling_params=params)
    is_stopping.set()
    with pytest.raises(KeyboardInterrupt):
        manager.stop()
    assert manager.is_running()
    is_seen.set()
    manager.stop()
    assert not manager.is_running()
    assert len(manager.get_result(request_id).generated_tokens) == 60
