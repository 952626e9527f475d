"""Each sequence of a pool is delivered once, whatever happens to the workers."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cb_rollout import FinishReason, GenerationOutput, RequestStatus, SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.integrations.ray.dispatcher import (
    CHUNK_TOKENS,
    MAX_FRUITLESS_DEATHS,
    Candidate,
    Dispatcher,
    PrefixRoutes,
)
from cb_rollout.integrations.ray.worker import ItemProgress, first_runs


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
        prompt_ids=[number % 3] * CHUNK_TOKENS,
        params=SamplingParams(),
        max_new_tokens=9,
        stop_tokens=frozenset(),
        seed=100 + number,
        group=number if group is None else group,
    )


def finished(item):
    tokens = [*item.token_ids, 7]
    return GenerationOutput(
        item.item_id,
        item.prompt_ids,
        tokens,
        [-1.0] * len(tokens),
        RequestStatus.FINISHED,
        FinishReason.STOP,
        policy_versions=[(0, len(tokens))],
    )


def test_sequences_go_to_the_least_loaded_worker_and_groups_stay_together():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(i, group=i // 4) for i in range(16)], sink)
    assigned = dispatcher.assign([Candidate(0, 0, 8), Candidate(1, 0, 8)])
    groups = {worker: [item.group for item in items] for worker, items in assigned.items()}
    assert groups == {0: [0] * 4 + [2] * 4, 1: [1] * 4 + [3] * 4}


def test_what_no_worker_has_room_for_waits_and_goes_to_the_first_that_has():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(i) for i in range(5)], sink)
    workers = [Candidate(0, 0, 2), Candidate(1, 0, 2)]
    items = dispatcher.assign(workers)
    assert (len(dispatcher._waiting), dispatcher.assign(workers)) == (1, {})
    dispatcher.deliver(1, [finished(items[1][0])])
    assert [item.item_id for item in dispatcher.assign(workers)[1]] == ["req_4/1"]


def test_a_group_that_is_larger_than_a_worker_is_split():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(i, group=0) for i in range(10)], sink)
    assigned = dispatcher.assign([Candidate(0, 0, 4), Candidate(1, 0, 4)])
    assert {worker: len(items) for worker, items in assigned.items()} == {0: 4, 1: 4}
    assert len(dispatcher._waiting) == 2


def test_sequences_of_a_dead_worker_go_on_elsewhere_with_the_tokens_they_had():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0), request(1), request(2)], sink)
    (first, second) = dispatcher.assign([Candidate(0, 3, 2)])[0]
    dispatcher.take_progress(
        0, [ItemProgress(first.item_id, 0, [4, 5], [-0.5, -0.25], [(2, 1), (3, 1)])]
    )
    dispatcher.withdraw(0, is_dead=True, reason="killed")
    (again, _, _) = dispatcher.assign([Candidate(1, 3, 9)])[1]
    assert (again.item_id, again.seed) == ("req_0/2", 100)
    assert (again.token_ids, again.logprobs) == ([4, 5], [-0.5, -0.25])
    assert again.policy_versions == [(2, 1), (3, 1)]
    # The dead worker's last words come too late.
    dispatcher.deliver(0, [finished(first), finished(second)])
    assert sink.outputs == []
    dispatcher.deliver(1, [finished(again)])
    assert [output.request_id for output in sink.outputs] == ["req_0"]


def test_an_earlier_attempt_on_the_same_worker_is_not_delivered():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0)], sink)
    (first,) = dispatcher.assign([Candidate(0, 0, 1)])[0]
    dispatcher.withdraw(0, is_dead=False)
    (second,) = dispatcher.assign([Candidate(0, 1, 1)])[0]
    dispatcher.deliver(0, [finished(first)])
    assert sink.outputs == []
    dispatcher.deliver(0, [finished(second)])
    assert len(sink.outputs) == 1


def test_a_sequence_goes_to_no_worker_with_older_weights_than_its_tokens():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0)], sink)
    (item,) = dispatcher.assign([Candidate(0, 5, 1)])[0]
    dispatcher.take_progress(0, [ItemProgress(item.item_id, 0, [4], [-1.0], [(5, 1)])])
    dispatcher.withdraw(0, is_dead=True, reason="killed")
    assert dispatcher.assign([Candidate(1, 4, 1)]) == {}
    assert len(dispatcher.assign([Candidate(1, 4, 1), Candidate(2, 5, 1)])[2]) == 1


def test_tokens_of_refused_weights_are_forgotten():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0)], sink)
    (item,) = dispatcher.assign([Candidate(0, 4, 1)])[0]
    runs = [(4, 2), (5, 1)]
    dispatcher.take_progress(0, [ItemProgress(item.item_id, 0, [4, 5, 6], [-1.0] * 3, runs)])
    dispatcher.withdraw(0, is_dead=True, reason="killed")
    dispatcher.forget_newer(4)
    (item,) = dispatcher.assign([Candidate(1, 4, 1)])[1]
    assert (item.token_ids, item.policy_versions) == ([4, 5], [(4, 2)])
    assert len(item.logprobs) == 2


def test_a_sequence_that_no_worker_survives_fails_and_progress_starts_its_count_again():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0)], sink)
    for worker in range(MAX_FRUITLESS_DEATHS + 1):
        assert sink.outputs == []
        (item,) = dispatcher.assign([Candidate(worker, 0, 1)])[worker]
        if worker == 0:
            progress = ItemProgress(item.item_id, 0, [4], [-1.0], [(0, 1)])
            dispatcher.take_progress(worker, [progress])
            assert item.token_ids == []
        dispatcher.withdraw(worker, is_dead=worker > 0, reason="no memory")
    (output,) = sink.outputs
    assert output.status is RequestStatus.FAILED
    assert f"{MAX_FRUITLESS_DEATHS} workers in a row" in output.error
    assert "no memory" in output.error
    assert output.generated_tokens == [4]


def test_a_cancelled_sequence_delivers_what_was_reported():
    dispatcher, sink = Dispatcher(), Sink()
    dispatcher.add([request(0), request(1)], sink)
    (item,) = dispatcher.assign([Candidate(0, 0, 1)])[0]
    dispatcher.take_progress(0, [ItemProgress(item.item_id, 0, [4], [-1.0], [(0, 1)])])
    assert dispatcher.cancel(["req_0", "req_1", "unknown"]) == {0: [item.item_id]}
    assert [output.generated_tokens for output in sink.outputs] == [[4], []]
    assert {output.status for output in sink.outputs} == {RequestStatus.CANCELLED}
    assert len(dispatcher) == dispatcher.load(0) == 0


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, []), (1, [(3, 1)]), (2, [(3, 2)]), (4, [(3, 2), (5, 2)])]
)
def test_the_first_tokens_of_runs(num_tokens, expected):
    assert first_runs([(3, 0), (5, 2)], num_tokens) == expected


# Two links of a prefix.
PROMPT = list(range(2 * CHUNK_TOKENS))


def workers(version=0, capacity=16):
    return [Candidate(number, version, capacity) for number in (0, 1)]


def assigned(dispatcher, candidates):
    """Return the worker of each prompt's first token."""
    found = dispatcher.assign(candidates)
    return {item.prompt_ids[0]: number for number, items in found.items() for item in items}


def conversation(number, first, *more):
    made = request(number)
    made.prompt_ids = [first, *PROMPT, *more]
    return made


def first_turns(dispatcher, sink, count=4):
    """Run one turn of `count` conversations; return the worker of each."""
    dispatcher.add([conversation(i, 100 + i) for i in range(count)], sink)
    found = {}
    for number, items in dispatcher.assign(workers()).items():
        for item in items:
            found[item.prompt_ids[0]] = number
            dispatcher.deliver(number, [finished(item)])
    return found


def test_a_conversation_goes_to_the_worker_that_has_its_keys():
    dispatcher, sink = Dispatcher(), Sink()
    first = first_turns(dispatcher, sink)
    assert first == {100: 0, 101: 1, 102: 0, 103: 1}
    # In an order in which the least loaded would be the other one each time.
    dispatcher.add([conversation(10 + i, 100 + i, 7, 8) for i in (1, 0, 3, 2)], sink)
    assert assigned(dispatcher, workers()) == first


def test_keys_of_an_older_policy_draw_nothing():
    dispatcher, sink = Dispatcher(), Sink()
    first_turns(dispatcher, sink)
    dispatcher.add([conversation(11, 101, 7, 8)], sink)
    assert assigned(dispatcher, workers(version=1)) == {101: 0}


def test_a_worker_with_keys_and_far_more_sequences_is_spared():
    dispatcher, sink = Dispatcher(), Sink()
    assert first_turns(dispatcher, sink, count=1) == {100: 0}
    dispatcher.add([conversation(10 + i, 100, i) for i in range(12)], sink)
    dispatcher.assign(workers(capacity=16))
    assert (dispatcher.load(0), dispatcher.load(1)) == (8, 4)


def test_a_prefix_of_less_than_half_the_prompt_draws_nothing():
    dispatcher, sink = Dispatcher(), Sink()
    first_turns(dispatcher, sink)
    news = [9] * (3 * CHUNK_TOKENS)
    dispatcher.add([conversation(11, 101, *news)], sink)
    assert assigned(dispatcher, workers()) == {101: 0}


def test_a_prefix_that_every_worker_has_leaves_loads_even():
    dispatcher, sink = Dispatcher(), Sink()
    first_turns(dispatcher, sink, count=0)
    dispatcher.add([conversation(i, 100) for i in range(2)], sink)
    for number, items in dispatcher.assign(workers()).items():
        dispatcher.deliver(number, [finished(item) for item in items])
    dispatcher.add([conversation(10 + i, 100, i) for i in range(12)], sink)
    dispatcher.assign(workers())
    assert dispatcher.load(0) == dispatcher.load(1) == 6


def test_a_full_worker_with_keys_holds_nobody_up():
    dispatcher, sink = Dispatcher(), Sink()
    first_turns(dispatcher, sink, count=8)
    dispatcher.add([conversation(10 + i, 100 + i, 7) for i in range(7)], sink)
    assert len(assigned(dispatcher, workers(capacity=4))) == 7
    assert (dispatcher.load(0), dispatcher.load(1)) == (4, 3)
    dispatcher.add([conversation(20, 100, 8)], sink)
    assert assigned(dispatcher, workers(capacity=4)) == {100: 1}


def test_the_latest_links_are_kept():
    routes = PrefixRoutes(max_links=4)
    routes.add(0, 0, [1, *PROMPT])
    routes.add(1, 0, [2, *PROMPT])
    # Used again.
    routes.add(1, 0, [1, *PROMPT])
    routes.add(0, 0, [3, *PROMPT])
    assert len(routes) == 4
    assert routes.longest({0, 1}, 0, [1, *PROMPT]) == (2 * CHUNK_TOKENS, {0, 1})
    assert routes.longest({1, 2}, 0, [1, *PROMPT]) == (2 * CHUNK_TOKENS, {1})
    assert routes.longest({0, 1}, 0, [2, *PROMPT]) == (0, {0, 1})
    assert routes.longest({0, 1}, 1, [1, *PROMPT]) == (0, {0, 1})


class DispatchedSequences(RuleBasedStateMachine):
    """Workers come, report, finish, die and change their weights in any order."""

    def __init__(self):
        super().__init__()
        self.dispatcher, self.sink = Dispatcher(), Sink()
        self.num_added = self.num_workers = self.version = 0
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
        candidates = [Candidate(number, self.version, 4) for number in self.items]
        for number, items in self.dispatcher.assign(candidates).items():
            for item in items:
                assert all(version <= self.version for version, _ in item.policy_versions)
                assert sum(n for _, n in item.policy_versions) == len(item.token_ids)
                self.items[number].append([item, list(item.token_ids), item.policy_versions])

    @precondition(lambda self: any(self.items.values()))
    @rule(data=st.data())
    def report(self, data):
        number = data.draw(st.sampled_from([n for n, items in self.items.items() if items]))
        running = data.draw(st.sampled_from(self.items[number]))
        item, tokens, runs = running
        tokens.append(len(tokens))
        runs = [*runs, (self.version, 1)]
        running[2] = runs
        progress = ItemProgress(item.item_id, len(tokens) - 1, tokens[-1:], [-1.0], runs)
        self.dispatcher.take_progress(number, [progress])

    @precondition(lambda self: any(self.items.values()))
    @rule(data=st.data())
    def finish(self, data):
        number = data.draw(st.sampled_from([n for n, items in self.items.items() if items]))
        item, tokens, _ = self.items[number].pop()
        assert tokens == list(range(len(tokens)))
        self.dispatcher.deliver(number, [finished(item)])

    @rule()
    def begin_version(self):
        self.version += 1

    @precondition(lambda self: self.items)
    @rule(data=st.data(), is_dead=st.booleans())
    def end(self, data, is_dead):
        number = data.draw(st.sampled_from(sorted(self.items)))
        lost = self.items.pop(number)
        item_ids = self.dispatcher.withdraw(number, is_dead=is_dead, reason="killed")
        assert sorted(item_ids) == sorted(item.item_id for item, *_ in lost)

    @rule(data=st.data())
    def cancel(self, data):
        number = data.draw(st.integers(0, self.num_added))
        for worker, item_ids in self.dispatcher.cancel([f"req_{number}"]).items():
            kept = [one for one in self.items[worker] if one[0].item_id not in item_ids]
            self.items[worker] = kept

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
