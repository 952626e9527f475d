"""Check that a caller that waits for its outputs steps the engine on its own thread."""

import os
import signal
import threading

import pytest
import torch
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.core import Engine
from cb_rollout.engine.service.interrupts import interrupts_deferred
from cb_rollout.errors import EngineDeadError, IncompleteRolloutError, RolloutError

LONG = 30.0


@pytest.fixture
def generator():
    with RolloutGenerator(tiny_model("llama"), RolloutConfig(seed=0)) as made:
        yield made


@pytest.fixture
def steppers(monkeypatch):
    threads = []
    step = Engine.step

    def watched(self):
        threads.append(threading.current_thread())
        return step(self)

    monkeypatch.setattr(Engine, "step", watched)
    return threads


def generate(generator, num_tokens=6):
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    return list(generator.generate_batch([[5, 6, 7]], sampling_params=params).values())


def test_every_step_of_a_waiting_caller_runs_on_its_thread(generator, steppers):
    generate(generator)
    generate(generator)
    assert set(steppers) == {threading.current_thread()}


def test_the_background_thread_steps_where_nobody_waits(generator, steppers):
    generator.manager.start()
    generator.manager.add_request([5, 6, 7], max_new_tokens=4)
    assert generator.manager.get_result(timeout=LONG).is_finished()
    assert {thread.name for thread in steppers} == {"cb_rollout"}


def test_a_second_caller_is_served_by_the_steps_of_the_first(generator, steppers):
    begun, outputs = threading.Event(), {}
    step = Engine.step

    def second():
        begun.wait(LONG)
        outputs["second"] = generate(generator, 30)

    thread = threading.Thread(target=second)
    thread.start()

    def signalling(self):
        begun.set()
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "step", signalling)
        outputs["first"] = generate(generator, 300)
    thread.join(LONG)
    assert [len(outputs[name][0].generated_tokens) for name in ("first", "second")] == [300, 30]


def test_a_signal_amid_a_step_is_handled_after_it(generator, monkeypatch):
    step, was_whole = Engine.step, []

    def interrupted(self):
        if not was_whole:
            os.kill(os.getpid(), signal.SIGINT)
            was_whole.append(False)
            touched = step(self)
            was_whole[0] = True
            return touched
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(generator)
    assert was_whole == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # The interrupted step was finished, so the engine still works.
    assert len(generate(generator)[0].generated_tokens) == 6
    assert generator.manager.engine.num_blocks_used == 0


def test_a_second_signal_is_not_deferred():
    def interrupt_twice():
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it was deferred too")

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_that_breaks_under_a_waiting_caller_is_started_over(generator, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        with pytest.raises(EngineDeadError, match="broken"):
            generate(generator)
    assert len(generate(generator)[0].generated_tokens) == 6


def test_a_step_cannot_pause_the_engine_that_runs_it(generator, monkeypatch):
    step, messages = Engine.step, []

    def pausing(self):
        with pytest.raises(RolloutError) as error, generator.manager.pause():
            pytest.fail("paused inside a step")
        messages.append(str(error.value))
        return step(self)

    monkeypatch.setattr(Engine, "step", pausing)
    generate(generator)
    assert "during its step" in messages[0]


def test_a_step_cannot_wait_for_the_engine_that_runs_it(generator):
    def ask_again(input_ids, scores):
        generator.generate_batch([[5]], max_new_tokens=2)
        return scores

    params = SamplingParams(max_new_tokens=4, logits_processors=[ask_again])
    with pytest.raises(IncompleteRolloutError, match="cannot wait for an output during a step"):
        generator.generate_batch([[5]], sampling_params=params)
    assert len(generator.generate_batch([[5]], max_new_tokens=2)) == 1


@pytest.mark.fast_cases("mode0")
@pytest.mark.parametrize(
    "mode", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()]
)
def test_the_callers_modes_do_not_reach_the_forward(generator, mode):
    with torch.no_grad():
        wanted = generate(generator)[0]
    generator.sync_weights()
    generator.manager.engine.release_cache()
    with RolloutGenerator(generator.manager.model, RolloutConfig(seed=0)) as again, mode:
        got = generate(again)[0]
    assert got.generated_tokens == wanted.generated_tokens
    assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
    # Pages allocated inside the mode must be writable outside of it.
    generate(generator)
