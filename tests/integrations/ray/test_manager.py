"""Workers that die, hang or take no weights are replaced; every wait of a pool ends."""

import asyncio
import threading
from functools import partial

import pytest
from waiting import wait_until

from cb_rollout import EngineDeadError, RequestStatus, SamplingParams, WeightSyncError
from cb_rollout.config.enums import InFlight
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.input_processor import ServingLimits
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.integrations.ray.cluster import WorkerLostError
from cb_rollout.integrations.ray.manager import MAX_FAILED_STARTS, PoolManager
from cb_rollout.integrations.ray.weight_update import WeightUpdate
from cb_rollout.integrations.ray.worker import WorkerDescription
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import FinishReason, GenerationOutput

CLOSED = EngineDeadError("closed")
WAIT = 20.0


class Reference:
    """The result of a call, once there is one."""

    def __init__(self, result=None):
        self.result = result


class FakeWorker:
    """Answers at once; a script says to what it does not."""

    def __init__(self, number, script):
        self.number, self.script = number, script
        self.items, self.versions, self.num_forwards, self.is_killed = [], [0], 0, False
        self.cancelled = []

    def answer(self, method, arguments):
        result = self.script(self, method)
        if result is not None:
            return result
        if method == "submit":
            self.items += arguments[0]
        elif method == "update":
            self.versions.append(arguments[0].version)
        elif method == "cancel":
            self.cancelled += arguments[0]
        elif method == "report":
            done, self.items = self.items, []
            self.num_forwards += len(done)
            counters = EngineCounters(decode_forwards=self.num_forwards)
            return [self.output(item) for item in done], counters
        return None

    def output(self, item):
        return GenerationOutput(
            item.item_id,
            item.prompt_ids,
            [self.number],
            [-1.0],
            RequestStatus.FINISHED,
            FinishReason.STOP,
            policy_versions=[(self.versions[-1], 1)],
        )


HANGS = object()
LIMITS = ServingLimits(
    vocab_size=partial(int, 9),
    max_positions=None,
    max_cached_tokens=partial(int, 99),
    model_eos=(),
)
DESCRIPTION = WorkerDescription(LIMITS, SamplingParams(), 4, (), None, None, 0)


class FakeCluster:
    """Calls that are answered as soon as they are waited for, or never."""

    def __init__(self, script=lambda worker, method: None):
        self.script, self.workers, self.is_closed = script, [], False

    def start_worker(self, *arguments):
        worker = FakeWorker(len(self.workers), self.script)
        self.workers.append(worker)
        result = self.script(worker, "start")
        return worker, [Reference((DESCRIPTION, "here") if result is None else result)]

    def record_process(self, process_id, node):
        pass

    def call(self, handle, method, *arguments):
        return [Reference(handle.answer(method, arguments))]

    def call_all(self, handle, method, *arguments):
        return self.call(handle, method, *arguments)

    async def results(self, references):
        (reference,) = references
        # Others run in the meantime.
        await asyncio.sleep(0)
        if reference.result is HANGS:
            await asyncio.Event().wait()
        if isinstance(reference.result, Exception):
            raise reference.result
        return [reference.result]

    def resources(self):
        return "a worker asks for 1 x {}, the cluster has 1 CPU, 0 of them free"

    def kill(self, handle):
        handle.is_killed = True

    def close(self):
        self.is_closed = True


@pytest.fixture
def manage():
    made = []

    def make(cluster, num_workers=2, timeout=WAIT, start_timeout=WAIT):
        made.append(PoolManager(cluster, (), num_workers, timeout, start_timeout))
        return made[-1]

    yield make
    for one in made:
        one.close(CLOSED)


def requests(count):
    return [
        Request(f"req_{i}", [1, 2], SamplingParams(), 9, frozenset(), seed=i, group=i)
        for i in range(count)
    ]


def sample(manager, count=6):
    queue = OutputQueue()
    manager.submit(requests(count), queue)
    found = [queue.take(timeout=WAIT) for _ in range(count)]
    assert None not in found
    assert sorted(output.request_id for output in found) == [f"req_{i}" for i in range(count)]
    return found


def update(manager):
    with manager.updating() as last:
        manager.update(WeightUpdate(last.version + 1), InFlight.RECOMPUTE)


def test_every_worker_samples_and_close_ends_all(manage):
    cluster = FakeCluster()
    manager = manage(cluster)
    assert manager.first_description() is DESCRIPTION
    wait_until(lambda: manager.num_alive == 2)
    assert {output.generated_tokens[0] for output in sample(manager)} == {0, 1}
    counters = manager.counters
    assert counters.decode_forwards == 6
    manager.close(CLOSED)
    assert cluster.is_closed
    assert all(worker.is_killed for worker in cluster.workers)
    assert (manager.num_alive, manager.counters) == (0, counters)
    with pytest.raises(EngineDeadError, match="closed"):
        manager.submit(requests(1), OutputQueue())


@pytest.mark.parametrize("method", ["submit", "report"])
def test_a_dead_worker_is_replaced_and_its_sequences_go_on(manage, method):
    def script(worker, called):
        dies = worker.number == 0 and called == method and (worker.items or called == "submit")
        return WorkerLostError("the node is gone") if dies else None

    cluster = FakeCluster(script)
    manager = manage(cluster)
    assert 0 not in {output.generated_tokens[0] for output in sample(manager)}
    wait_until(lambda: manager.num_alive == 2)
    assert cluster.workers[0].is_killed
    assert len(cluster.workers) == 3


def test_a_request_that_a_worker_cannot_read_fails_alone(manage):
    def script(worker, called):
        return RolloutError("No module named 'mine'.") if called == "submit" else None

    cluster = FakeCluster(script)
    manager = manage(cluster)
    wait_until(lambda: manager.num_alive == 2)
    (output,) = sample(manager, 1)
    assert output.status is RequestStatus.FAILED
    assert "No module named 'mine'" in output.error
    assert (manager.num_alive, len(cluster.workers)) == (2, 2)


@pytest.mark.fast_cases("no forward")
@pytest.mark.parametrize("how", ["no answer", "no forward"])
def test_a_worker_that_hangs_is_replaced_and_its_sequences_go_on(manage, how):
    def script(worker, called):
        if worker.number or called != "report" or not worker.items:
            return None
        return HANGS if how == "no answer" else ([], EngineCounters())

    cluster = FakeCluster(script)
    manager = manage(cluster, timeout=0.3)
    assert 0 not in {output.generated_tokens[0] for output in sample(manager)}
    assert cluster.workers[0].items, "the worker that hangs had sequences"
    wait_until(lambda: manager.num_alive == 2)
    assert cluster.workers[0].is_killed
    assert len(cluster.workers) == 3


def test_a_worker_that_does_not_answer_an_update_is_replaced_by_one_that_has_it(manage):
    cluster = FakeCluster(lambda w, called: HANGS if (w.number, called) == (0, "update") else None)
    manager = manage(cluster, timeout=0.3)
    wait_until(lambda: manager.num_alive == 2)
    update(manager)
    wait_until(lambda: manager.num_alive == 2)
    assert {output.policy_versions[0] for output in sample(manager)} == {(1, 1)}
    assert cluster.workers[0].is_killed
    assert cluster.workers[2].versions == [0, 1]


def test_a_worker_that_dies_in_an_update_is_replaced_by_one_that_has_it(manage):
    def script(worker, called):
        dies = (worker.number, called) == (1, "update")
        return WorkerLostError("killed") if dies else None

    cluster = FakeCluster(script)
    manager = manage(cluster)
    wait_until(lambda: manager.num_alive == 2)
    update(manager)
    assert {output.policy_versions[0] for output in sample(manager)} == {(1, 1)}
    wait_until(lambda: manager.num_alive == 2)
    assert cluster.workers[1].is_killed
    assert [worker.versions[-1] for worker in cluster.workers] == [1, 0, 1]


def test_a_worker_that_takes_no_weights_is_replaced(manage):
    def script(worker, called):
        is_refused = (worker.number, called) == (0, "update")
        return WeightSyncError("of another model") if is_refused else None

    cluster = FakeCluster(script)
    manager = manage(cluster)
    wait_until(lambda: manager.num_alive == 2)
    update(manager)
    wait_until(lambda: cluster.workers[0].is_killed and manager.num_alive == 2)
    found = sample(manager)
    assert {output.generated_tokens[0] for output in found} == {1, 2}
    assert {output.policy_versions[0] for output in found} == {(1, 1)}


def test_weights_that_no_worker_takes_are_not_those_of_the_pool(manage):
    refusals = [WeightSyncError("of another model")] * 2
    cluster = FakeCluster(
        lambda w, called: refusals.pop() if called == "update" and refusals else None
    )
    manager = manage(cluster)
    wait_until(lambda: manager.num_alive == 2)
    with pytest.raises(
        WeightSyncError, match=r"no worker accepted the weights: .*of another model"
    ):
        update(manager)
    assert manager.policy_version == 0
    wait_until(lambda: manager.num_alive == 2)
    assert {output.policy_versions[0] for output in sample(manager)} == {(0, 1)}
    update(manager)
    assert manager.policy_version == 1


def test_an_update_waits_for_one_of_another_thread(manage):
    manager = manage(FakeCluster())
    manager.first_description()
    with manager.updating() as last:
        other = threading.Thread(target=update, args=(manager,), daemon=True)
        other.start()
        manager.update(WeightUpdate(last.version + 1), InFlight.RECOMPUTE)
        assert manager.policy_version == last.version + 1 == 1
    other.join(WAIT)
    assert manager.policy_version == 2


def test_a_worker_that_joins_late_gets_the_current_weights_first(manage):
    cluster = FakeCluster()
    manager = manage(cluster, num_workers=1)
    manager.first_description()
    update(manager)
    update(manager)
    manager.resize(3)
    wait_until(lambda: manager.num_alive == 3)
    assert [worker.versions for worker in cluster.workers] == [[0, 1, 2], [0, 2], [0, 2]]
    manager.resize(1)
    assert manager.num_alive == 1
    assert len(sample(manager)) == 6


def test_a_model_that_is_refused_raises_its_own_error(manage):
    cluster = FakeCluster(
        lambda w, called: ConfigurationError("no such model") if called == "start" else None
    )
    manager = manage(cluster)
    with pytest.raises(ConfigurationError, match="no such model"):
        manager.first_description()


def test_a_worker_that_does_not_start_is_replaced_before_the_first_one_runs(manage):
    def script(worker, called):
        is_bad = called == "start" and worker.number == 0
        return MemoryError("no memory on this machine") if is_bad else None

    cluster = FakeCluster(script)
    manager = manage(cluster)
    assert manager.first_description() is DESCRIPTION
    wait_until(lambda: manager.num_alive == 2)
    assert cluster.workers[0].is_killed


def test_workers_of_which_none_starts_raise_the_last_reason(manage):
    cluster = FakeCluster(
        lambda w, called: WorkerLostError("out of memory") if called == "start" else None
    )
    manager = manage(cluster)
    with pytest.raises(EngineDeadError, match=r"workers in a row did not start.*out of memory"):
        manager.first_description()


def test_a_smaller_pool_keeps_the_workers_that_run(manage):
    cluster = FakeCluster(lambda w, called: HANGS if called == "start" and w.number > 1 else None)
    manager = manage(cluster)
    wait_until(lambda: manager.num_alive == 2)
    manager.resize(4)
    wait_until(lambda: len(cluster.workers) == 4)
    manager.resize(2)
    assert manager.num_alive == 2
    assert [worker.is_killed for worker in cluster.workers] == [False, False, True, True]


def test_parameters_that_cannot_be_pickled_fail_their_sequence_and_say_so(manage):
    class Unpicklable(FakeCluster):
        def call(self, handle, method, *arguments):
            if method == "submit":
                raise TypeError("cannot pickle a lock")
            return super().call(handle, method, *arguments)

    manager = manage(Unpicklable())
    manager.first_description()
    (output,) = sample(manager, 1)
    assert output.status is RequestStatus.FAILED
    assert "cannot pickle a lock; what SamplingParams holds must be picklable" in output.error


def test_workers_that_never_start_again_end_the_pool_and_not_its_callers(manage):
    def script(worker, called):
        if called == "submit" or (called == "start" and worker.number):
            return WorkerLostError("out of memory")
        return None

    cluster = FakeCluster(script)
    manager = manage(cluster, num_workers=1)
    manager.first_description()
    queue = OutputQueue()
    manager.submit(requests(2), queue)
    with pytest.raises(EngineDeadError, match=f"{MAX_FAILED_STARTS} workers in a row.*memory"):
        queue.take(timeout=WAIT)
    with pytest.raises(EngineDeadError):
        update(manager)


def test_no_worker_in_time_is_an_error_that_names_the_knob(manage):
    cluster = FakeCluster(lambda w, called: HANGS if called == "start" else None)
    manager = manage(cluster, start_timeout=0.1)
    with pytest.raises(EngineDeadError, match=r"start_timeout_seconds=0.1.*resources_per_worker"):
        manager.first_description()


def test_a_bug_in_the_pool_reaches_those_who_wait(manage):
    manager = manage(FakeCluster())
    manager.first_description()
    queue = OutputQueue()
    manager._dispatcher.deliver = lambda worker, outputs: 1 / 0
    manager.submit(requests(1), queue)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        queue.take(timeout=WAIT)


def test_cancelled_sequences_are_ended_at_their_worker(manage):
    cluster = FakeCluster(lambda w, called: HANGS if called == "report" and w.items else None)
    manager = manage(cluster, timeout=0.3)
    manager.first_description()
    queue = OutputQueue()
    manager.submit(requests(3), queue)
    manager.cancel_requests(["req_0", "req_1", "req_2"])
    statuses = {queue.take(timeout=WAIT).status for _ in range(3)}
    assert statuses == {RequestStatus.CANCELLED}
    for worker in cluster.workers[:2]:
        assert worker.cancelled == [item.item_id for item in worker.items]
    assert sum(len(worker.cancelled) for worker in cluster.workers) == 3
