"""Each sequence of a pool is delivered once, whatever happens to the workers."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cb_rollout import FinishReason, GenerationOutput, RequestStatus, SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.integrations.ray.dispatcher import MAX_DEATHS, Dispatcher


class Sink:
    def __init__(self):
        self.outputs = []

    def put(self, output):
        self.outputs.append(output)

    def close(self, error):
        raise AssertionError(error)


def request(number, group=None):
    return Request(
        request_id=f"req_{number}",
        prompt_ids=[number % 3] * 4,
        params=SamplingParams(),
        max_new_tokens=9,
        stop_tokens=frozenset(),
        seed=100 + number,
        group=number if group is None else group,
    )


def finished(item):
    return GenerationOutput(
        item.item_id,
        item.prompt_ids,
        [7],
        [-1.0],
        RequestStatus.FINISHED,
        FinishReason.STOP,
        policy_versions=[(0, 1)],
    )


def test_sequences_go_to_the_least_loaded_worker_and_groups_stay_together():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(i, group=i // 4) for i in range(16)], sink)
    assigned = dispatcher.assign({0: 8, 1: 8})
    groups = {worker: [item.group for item in items] for worker, items in assigned.items()}
    assert groups == {0: [0] * 4 + [2] * 4, 1: [1] * 4 + [3] * 4}


def test_what_no_worker_has_room_for_waits_and_goes_to_the_first_that_has():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(i) for i in range(5)], sink)
    workers = {0: 2, 1: 2}
    items = dispatcher.assign(workers)
    assert (len(dispatcher._waiting), dispatcher.assign(workers)) == (1, {})
    dispatcher.deliver(1, [finished(items[1][0])])
    assert [item.item_id for item in dispatcher.assign(workers)[1]] == ["req_4/1"]


def test_a_group_that_is_larger_than_a_worker_is_split():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(i, group=0) for i in range(10)], sink)
    assigned = dispatcher.assign({0: 4, 1: 4})
    assert {worker: len(items) for worker, items in assigned.items()} == {0: 4, 1: 4}
    assert len(dispatcher._waiting) == 2


def test_sequences_of_a_dead_worker_begin_again_elsewhere_before_those_that_wait():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0), request(1), request(2)], sink)
    (first, second) = dispatcher.assign({0: 2})[0]
    dispatcher.withdraw(0, is_dead=True, reason="killed")
    again = dispatcher.assign({1: 9})[1]
    assert [item.item_id for item in again] == ["req_0/2", "req_1/2", "req_2/1"]
    assert [item.seed for item in again] == [100, 101, 102]
    # The dead worker's last words come too late.
    dispatcher.deliver(0, [finished(first), finished(second)])
    assert sink.outputs == []
    dispatcher.deliver(1, [finished(again[0])])
    assert [output.request_id for output in sink.outputs] == ["req_0"]


def test_an_earlier_attempt_on_the_same_worker_is_not_delivered():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0)], sink)
    (first,) = dispatcher.assign({0: 1})[0]
    dispatcher.withdraw(0, is_dead=False)
    (second,) = dispatcher.assign({0: 1})[0]
    dispatcher.deliver(0, [finished(first)])
    assert sink.outputs == []
    dispatcher.deliver(0, [finished(second)])
    assert len(sink.outputs) == 1


def test_a_sequence_that_no_worker_survives_fails():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0)], sink)
    for worker in range(MAX_DEATHS + 1):
        assert sink.outputs == []
        assert len(dispatcher.assign({worker: 1})[worker]) == 1
        dispatcher.withdraw(worker, is_dead=worker > 0, reason="no memory")
    (output,) = sink.outputs
    assert output.status is RequestStatus.FAILED
    assert f"{MAX_DEATHS} workers in a row" in output.error
    assert "no memory" in output.error


def test_a_cancelled_sequence_delivers_what_its_worker_has():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0), request(1), request(2)], sink)
    first, second = dispatcher.assign({0: 2})[0]
    items = {0: [first.item_id, second.item_id]}
    assert dispatcher.cancel(["req_0", "req_1", "req_2", "unknown"]) == items
    assert [output.request_id for output in sink.outputs] == ["req_2"]
    dispatcher.deliver(0, [finished(first)])
    dispatcher.withdraw(0, is_dead=True, reason="killed")
    assert [output.generated_tokens for output in sink.outputs] == [[], [7], []]
    assert sink.outputs[2].status is RequestStatus.CANCELLED
    assert len(dispatcher) == dispatcher.load(0) == 0


class DispatchedSequences(RuleBasedStateMachine):
    """Workers come, finish and die in any order."""

    def __init__(self):
        super().__init__()
        self.dispatcher, self.sink = Dispatcher(), Sink()
        self.num_added = self.num_workers = 0
        self.items = {}

    @rule(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
    def add(self, sizes):
        first = self.num_added
        requests = []
        for group, size in enumerate(sizes):
            requests += [request(first + len(requests) + i, first + group) for i in range(size)]
        self.num_added += len(requests)
        self.dispatcher.add(requests, self.sink)

    @rule()
    def start(self):
        self.items[self.num_workers] = []
        self.num_workers += 1

    @rule()
    def assign(self):
        for number, items in self.dispatcher.assign(dict.fromkeys(self.items, 4)).items():
            self.items[number] += items

    @precondition(lambda self: any(self.items.values()))
    @rule(data=st.data())
    def finish(self, data):
        number = data.draw(st.sampled_from([n for n, items in self.items.items() if items]))
        self.dispatcher.deliver(number, [finished(self.items[number].pop())])

    @precondition(lambda self: self.items)
    @rule(data=st.data(), is_dead=st.booleans())
    def end(self, data, is_dead):
        number = data.draw(st.sampled_from(sorted(self.items)))
        lost = self.items.pop(number)
        num_lost = self.dispatcher.withdraw(number, is_dead=is_dead, reason="killed")
        assert num_lost == len(lost)

    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.integers(0, self.num_added))
        for worker, item_ids in self.dispatcher.cancel([f"req_{number}"]).items():
            assert {*item_ids} <= {item.item_id for item in self.items[worker]}

    @invariant()
    def every_sequence_is_in_one_place(self):
        delivered = [output.request_id for output in self.sink.outputs]
        assert len(set(delivered)) == len(delivered)
        running = sum(map(len, self.items.values()))
        assert len(self.dispatcher) == running + len(self.dispatcher._waiting)
        assert len(self.dispatcher) + len(delivered) == self.num_added
        for number, items in self.items.items():
            assert self.dispatcher.load(number) == len(items) <= 4


TestDispatchedSequences = DispatchedSequences.TestCase
TestDispatchedSequences.settings = settings(max_examples=40, stateful_step_count=30)
