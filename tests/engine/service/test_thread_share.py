"""Steps use fewer of torch's threads while other processes use the cores."""

import subprocess
import sys
import time

import pytest
import torch
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.engine.service import thread_share
from cb_rollout.engine.service.thread_share import Clocks, ThreadShare, clocks, usable_cores

NUM_THREADS = 4


class Machine:
    """Clocks of four cores that the test moves."""

    def __init__(self):
        self.now = self.used = self.used_here = 0.0

    def read(self):
        return Clocks(now=self.now, used=self.used, used_here=self.used_here)

    def pass_time(self, own, others, seconds=1.0):
        """Let this process and others use so many cores for a while."""
        self.now += seconds
        self.used_here += own * seconds
        self.used += (own + others) * seconds


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(thread_share, "usable_cores", lambda: range(NUM_THREADS))
    monkeypatch.setattr(thread_share.time, "perf_counter", lambda: made.now)
    before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    yield made
    torch.set_num_threads(before)


def threads_beside(machine, share, others, own=2.0):
    machine.pass_time(own=own, others=others)
    share.adjust()
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("others", "num_threads"), [(0.0, 4), (0.4, 4), (0.6, 3), (2.0, 2), (3.2, 1), (4.0, 1)]
)
def test_as_many_threads_compute_as_cores_are_left(machine, others, num_threads):
    share = ThreadShare(machine.read)
    share.adjust()
    assert threads_beside(machine, share, others) == num_threads
    share.restore()
    assert torch.get_num_threads() == NUM_THREADS


def test_all_threads_compute_again_once_the_others_end(machine):
    share = ThreadShare(machine.read)
    share.adjust()
    assert [threads_beside(machine, share, others) for others in (3, 1, 0)] == [1, 3, 4]
    # What the user sets from now on is kept.
    torch.set_num_threads(2)
    assert threads_beside(machine, share, 0) == 2
    share.restore()
    assert torch.get_num_threads() == 2


def test_a_load_of_a_moment_changes_nothing(machine):
    share = ThreadShare(machine.read)
    share.adjust()
    machine.pass_time(own=1.0, others=3.0, seconds=0.1)
    share.adjust()
    assert torch.get_num_threads() == NUM_THREADS


def test_deterministic_algorithms_keep_their_threads(machine):
    share = ThreadShare(machine.read)
    share.adjust()
    torch.use_deterministic_algorithms(True)
    try:
        assert threads_beside(machine, share, 4.0) == NUM_THREADS
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_machine_that_does_not_show_its_load_keeps_its_threads(machine):
    share = ThreadShare(lambda: None)
    share.adjust()
    assert threads_beside(machine, share, 4.0) == NUM_THREADS


@pytest.mark.skipif(clocks() is None, reason="needs Linux")
def test_the_clocks_tell_another_process_from_this_one():
    """A process that computes without end is seen, and what this process computes is not."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = clocks()
        while time.perf_counter() - before.now < 1.0:
            pass
        after = clocks()
    finally:
        busy.kill()
        busy.wait()
    seconds = after.now - before.now
    own = (after.used_here - before.used_here) / seconds
    by_others = (after.used - before.used) / seconds - own
    # On a single core they share it.
    assert by_others > 0.3
    assert own <= 1.1
    assert own + by_others <= len(usable_cores()) * 1.1


def test_a_rollout_beside_busy_cores_uses_one_thread_and_gives_the_others_back(monkeypatch):
    numbers = []
    with RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=32)) as generator:
        loop = generator.manager.loop
        machine = Machine()

        def read():
            machine.pass_time(own=1.0, others=len(usable_cores()))
            return machine.read()

        loop.thread_share = ThreadShare(read)
        monkeypatch.setattr(thread_share, "WINDOW_SECONDS", -1e9)
        step = generator.manager.engine.step
        monkeypatch.setattr(
            generator.manager.engine,
            "step",
            lambda: (numbers.append(torch.get_num_threads()), step())[1],
        )
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            generator.generate_batch([[5, 6, 7]], max_new_tokens=5)
            after = torch.get_num_threads()
        finally:
            torch.set_num_threads(before)
    assert numbers[0] == 2
    assert set(numbers[1:]) == {1}
    assert after == 2


def test_the_background_thread_leaves_the_number_of_a_caller_that_steps():
    """It waits meanwhile, and gives back what it took itself, which is nothing."""
    with RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=32)) as generator:
        loop = generator.manager.loop
        generator.manager.start()
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            loop.thread_share._set(1)
            generator.manager.add_request([5, 6, 7], max_new_tokens=3)
            assert generator.manager.get_result(timeout=60) is not None
            assert torch.get_num_threads() == 1
            loop.thread_share.restore()
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)
