"""A path of decode steps is chosen, asked and called as `DecodePath` says."""

import pytest
from documented import block, run
from fake_model import FakeModel, request_of
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.cuda_graphs import selection
from cb_rollout.engine.decode.stepwise import StepwiseDecoding
from cb_rollout.engine.executor import StepExecutor
from cb_rollout.engine.request import Limits
from cb_rollout.types import RequestStatus

EXAMPLE = run(block("Add a path of decode steps", "docs/extending.md"))
PROMPTS = [[5, 6, 7], [8, 9], [3, 4, 5, 6, 7, 8, 9]]
GATHERED = {"max_blocks_per_request": 0}
MIB = 1 << 20


def rollout(generator):
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    outputs = generator.generate_batch(PROMPTS, sampling_params=params).values()
    return [output.generated_tokens for output in outputs], [o.logprobs for o in outputs]


def add_path(monkeypatch, create):
    monkeypatch.setattr(selection, "DECODE_PATHS", [create, *selection.DECODE_PATHS])


def test_a_path_of_ones_own_runs_the_decode_steps_and_says_so(monkeypatch):
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(seed=0, **GATHERED)) as generator:
        expected = rollout(generator)
        assert "rows a forward" not in generator.manager.decode_path
    add_path(monkeypatch, EXAMPLE["create_in_parts"])
    num_rows = []
    with RolloutGenerator(model, RolloutConfig(seed=0, **GATHERED)) as generator:
        assert generator.manager.decode_path.endswith("decode steps: 2 rows a forward")
        runner = generator.manager.engine.runner
        forward = runner.logits
        runner.logits = lambda batch: num_rows.append(len(batch)) or forward(batch)
        found = rollout(generator)
    assert num_rows[-2:] == [2, 1]
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_a_path_with_an_obstacle_leaves_the_steps_to_the_next(monkeypatch):
    add_path(monkeypatch, EXAMPLE["create_in_parts"])
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        path = generator.manager.decode_path
    assert "decode attention: cpp" in path
    assert "rows a forward" not in path


class Holding(StepwiseDecoding):
    """Holds a MiB while steps run, and none yet."""

    planned_bytes = MIB


def test_the_memory_that_a_path_will_hold_is_not_planned_for_the_cache(monkeypatch):
    add_path(monkeypatch, lambda runner, config, max_rows: Holding(runner))
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        assert generator.memory_plan().graph_bytes == MIB


class Refreshed(StepwiseDecoding):
    """Notes what it is asked to do."""

    def __init__(self, runner, calls):
        super().__init__(runner)
        self.calls = calls

    @property
    def is_released(self):
        return self.calls[-1:] == ["release"]

    def check_weights(self):
        self.calls.append("check")

    def begin(self):
        self.calls.append("begin")

    def warm_up(self, num_steps):
        self.calls.append("warm up")

    def release(self):
        self.calls.append("release")


def test_a_path_is_checked_before_it_begins_and_warmed_up_again_once_it_was_released(monkeypatch):
    calls = []
    add_path(monkeypatch, lambda runner, config, max_rows: Refreshed(runner, calls))
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        rollout(generator)
        assert calls == ["check", "begin"]
        calls.clear()
        generator.sleep(release_graphs=True)
        generator.sync_weights()
        assert calls == ["release"]
        generator.wake()
        assert calls == ["release", "check", "warm up"]
        calls.clear()
        generator.sleep()
        generator.wake()
        assert calls == []


class Ahead(StepwiseDecoding):
    """Assigns the blocks of the next step before its sequences are scheduled."""

    def __init__(self, runner):
        super().__init__(runner)
        self.ahead, self.num_ahead = [], 0

    def launched(self):
        running, self.ahead = self.ahead, []
        self.num_ahead += bool(running)
        return running

    def step(self, running, context):
        touched = super().step(running, context)
        going = [r for r in touched if r.status is RequestStatus.DECODING]
        extended = context.scheduler.blocks.extend_ahead(going)
        if going and extended is not None:
            context.storage.table.write(extended)
            self.ahead = going
        return touched

    def discard_launched(self):
        self.ahead = []


@pytest.mark.parametrize("fails", [False, True])
def test_sequences_that_a_path_launched_are_stepped_before_others_are_scheduled(fails):
    limits = Limits(
        block_size=2,
        max_batch_tokens=16,
        max_requests=4,
        can_share_blocks=True,
        can_resume_prompts=True,
        is_packed=False,
    )
    model = FakeModel(limits, num_blocks=40, max_blocks=40)
    path = Ahead(model)
    model.executor = StepExecutor(model.executor.context, path)
    requests = [request_of([1, 1, 0], max_new_tokens=6, name=str(n)) for n in range(3)]
    model.add(*requests)
    for number in range(100):
        if not model.scheduler.has_work:
            break
        if fails and number == 3:
            model.error = MemoryError("none left")
        model.step()
        model.check()
    assert [request.num_generated for request in requests] == [6, 6, 6]
    assert path.num_ahead >= 4 - fails
