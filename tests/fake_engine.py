"""An engine without a model: keys are what they depend on, so that a wrong one is seen at once."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding, GraphSizes
from cb_rollout.engine.cuda_graphs.inputs import Line
from cb_rollout.engine.cuda_graphs.steps import GraphedSteps
from cb_rollout.engine.request import NO_TABLE_ROW, Request
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.metrics.counters import EngineCounters
from cb_rollout.types import FinishReason, RequestStatus

MOST_STEPS = 3000
# Far more than any run needs; a run that takes longer starves somebody.


def request_of(prompt_ids, max_new_tokens=4, name="r", group=None):
    return Request(
        request_id=name,
        prompt_ids=prompt_ids,
        params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_tokens=frozenset(),
        seed=0,
        group=group,
    )


def cancel(engine, request):
    request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    engine.scheduler.retire(request)


class FakeEngine:
    """Drives a scheduler as `core.Engine` does; a key is the policy and all tokens it depends on.

    So a forward that would read a wrong, moved, overwritten or outdated key is seen at once.
    """

    def __init__(self, limits, num_blocks, most_blocks):
        self.limits, self.most_blocks = limits, most_blocks
        self.counters = EngineCounters()
        self.scheduler = Scheduler(limits, self.counters, self.grow)
        self.scheduler.pool.grow(num_blocks)
        self.requests = []
        self.keys = {}

    def add(self, *requests):
        for request in requests:
            # One that no other has; a device that knows seed and place knows the token.
            request.seed = len(self.requests)
            self.requests.append(request)
            self.scheduler.add(request)

    def grow(self, count):
        now = self.scheduler.pool.num_blocks
        return max(now, min(self.most_blocks, max(2 * now, now + count)))

    def expected_token(self, request, index):
        return (request.seed + index) % 2

    def sample(self, request):
        index = request.num_generated
        version = self.scheduler.blocks.policy_version
        request.append(self.expected_token(request, index), self.logprob(index, version), version)

    def logprob(self, index, version):
        """A number that tells under which policy a token was sampled, and where."""
        return -float(index + 100 * version)

    def compute(self, request, end):
        """What a forward does: read every cached key, then write the keys of the new tokens."""
        size, version = self.limits.block_size, self.scheduler.blocks.policy_version
        known = [*request.token_ids, self.expected_token(request, request.num_generated)]
        for position in range(end):
            place = (request.block_ids[position // size], position % size)
            tokens = tuple(known[: position + 1])
            # What is computed from kept keys belongs to no version, and to this sequence alone.
            origin = request.request_id if request.has_old_keys else version
            if position < request.num_computed:
                stored_origin, *stored = self.keys.get(place, (None,))
                assert tuple(stored) == tokens, "a forward would read another token's key"
                is_kept = request.has_old_keys and isinstance(stored_origin, int)
                assert is_kept or stored_origin == origin, "a forward would read an outdated key"
            else:
                self.keys[place] = (origin, *tokens)

    def copy_blocks(self, sources, targets):
        size = self.limits.block_size
        for source, target in zip(sources, targets, strict=True):
            for offset in range(size):
                self.keys[target, offset] = self.keys.get((source, offset))

    def check_prefill(self, chosen):
        limits = self.limits
        width = max(prefill.num_scheduled for prefill in chosen)
        assert len(chosen) == 1 or width * len(chosen) <= limits.max_batch_tokens
        assert all(prefill.num_scheduled > 0 for prefill in chosen)
        for prefill in chosen:
            if limits.can_resume_prompts:
                assert prefill.num_scheduled <= limits.max_batch_tokens
            else:
                assert prefill.leader.num_computed == 0
                assert prefill.is_last_chunk
            num_shared = len(prefill.leader.prompt_ids) // limits.block_size
            num_shared *= limits.can_share_blocks
            for follower in prefill.followers:
                assert follower.prompt_ids == prefill.leader.prompt_ids
                mine, theirs = follower.block_ids, prefill.leader.block_ids
                assert mine[:num_shared] == theirs[:num_shared]
                assert not set(mine[num_shared:]) & set(theirs)

    def step(self):
        """One forward of prompts and one of running sequences; True if any ran."""
        chosen = self.scheduler.schedule_prefill()
        if chosen:
            self.check_prefill(chosen)
            self.begin_prefill()
        for prefill in chosen:
            self.compute(prefill.leader, prefill.leader.num_computed + prefill.num_scheduled)
        for prefill in chosen:
            is_last_chunk = prefill.is_last_chunk
            self.copy_blocks(*self.scheduler.complete_prefill(prefill))
            if is_last_chunk:
                for request in (prefill.leader, *prefill.followers):
                    self.sample(request)
        self.scheduler.retire_running()
        has_decoded = self.decode()
        self.scheduler.retire_running()
        return bool(chosen) or has_decoded

    def begin_prefill(self):
        self.scheduler.take_seated()

    def settle(self):
        """Nothing is ahead of anything here."""

    def decode(self):
        """One forward of the running sequences; whether there are any."""
        running, _ = self.schedule_decode()
        for request in running:
            assert request.num_computed == request.num_tokens - 1
            self.compute(request, request.num_tokens)
        self.scheduler.complete_decode(running)
        for request in running:
            self.sample(request)
        return bool(running)

    def schedule_decode(self):
        extended = self.scheduler.schedule_decode()
        seated = {request.table_row: request for request in self.scheduler.running}
        for table_row, index, block in extended:
            assert seated[table_row].block_ids[index] == block
        return list(self.scheduler.running), extended

    def drain(self):
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("some sequence starves")

    def check(self):
        """What holds between any two calls."""
        pool = self.scheduler.pool
        seated = [request for request in self.requests if request.table_row != NO_TABLE_ROW]
        held = Counter(block for request in seated for block in request.block_ids)
        counts = {b: n for b, n in enumerate(pool._reference_counts) if n}
        assert held == counts
        assert pool.num_used == len(held)
        table_rows = [request.table_row for request in seated] + self.scheduler._free_table_rows
        assert sorted(table_rows) == list(range(self.limits.max_requests))
        unfinished = [request for request in self.requests if not request.status.is_final]
        assert len(self.scheduler.waiting) == len(unfinished) - len(seated)
        assert self.scheduler.has_work == bool(unfinished)
        for request in self.requests:
            assert request.num_computed <= request.num_tokens
            assert request.table_row != NO_TABLE_ROW or not request.block_ids
            count = request.num_generated
            tokens = [self.expected_token(request, i) for i in range(count)]
            assert request.token_ids == [*request.prompt_ids, *tokens]
            versions = [version for version, n in request.policy_versions for _ in range(n)]
            assert request.logprobs == [self.logprob(*at) for at in enumerate(versions)]
            assert len(versions) == count


class GraphedFakeEngine(FakeEngine):
    """Decodes by graphs, a step ahead; what would run on a device runs when it is launched.

    A device knows its buffers and the block table, and nothing of sequences: a row that is left in
    them writes where it stands, whoever has the block by then.
    """

    def __init__(self, limits, num_blocks, most_blocks):
        super().__init__(limits, num_blocks, most_blocks)
        self.blocks = {}
        decoding = SimpleNamespace(
            find=lambda cache, table: None, splits=lambda rows, keys: 1, rows_per_tile=3
        )
        runner = SimpleNamespace(device=torch.device("cpu"))
        self.graphs = GraphedDecoding(
            runner, decoding, GraphSizes(), limits.max_requests, capture=lambda step: self.replay
        )
        table = SimpleNamespace(block_size=limits.block_size, write=self.write_table)
        storage = SimpleNamespace(cache=None, table=table)
        parts = self.graphs, self.scheduler, storage, None, self.counters, None
        self.graphed = GraphedSteps(*parts, looks_ahead=True)
        self.num_ahead = 0

    def write_table(self, entries):
        self.blocks |= {(table_row, index): block for table_row, index, block in entries}

    def begin_prefill(self):
        self.graphed.note_prefill()
        for request in self.scheduler.take_seated():
            self.write_table(
                (request.table_row, i, block) for i, block in enumerate(request.block_ids)
            )

    def settle(self):
        self.graphed.forget()

    def decode(self):
        if (collected := self.graphed.collect()) is not None:
            self.num_ahead += 1
            return bool(collected[0])
        running, extended = self.schedule_decode()
        self.write_table(extended)
        return bool(running) and self.graphed.run(running) == len(running)

    def replay(self):
        tensor, results_N3 = self.graphs._inputs.tensor, self.graphs._results_N3
        running = self.running_rows()
        for row in (tensor[Line.LENGTH] > 0).nonzero()[:, 0].tolist():
            length, table_row, seed, index = tensor[
                [Line.LENGTH, Line.TABLE_ROW, Line.SEED, Line.INDEX], row
            ].tolist()
            if row in running:
                assert length == len(running[row].prompt_ids) + index
                assert index < running[row].max_new_tokens
                self.compute(running[row], length)
            else:
                self.keys[self.place(table_row, length - 1)] = ("nobody",)
            logprob = self.logprob(index, self.scheduler.blocks.policy_version)
            results_N3[row] = torch.tensor([(seed + index) % 2, logprob, 1])
        self.check_tiles(tensor, running)
        tensor[Line.LENGTH] += tensor[Line.LENGTH] > 0
        tensor[Line.INDEX] += 1

    def place(self, table_row, position):
        size = self.limits.block_size
        return self.blocks[table_row, position // size], position % size

    def running_rows(self):
        """The sequence of each row of the buffers that has one which still runs."""
        tensor = self.graphs._inputs.tensor
        seated = {r.table_row: r for r in self.requests if r.table_row != NO_TABLE_ROW}
        found = {}
        for row in (tensor[Line.LENGTH] > 0).nonzero()[:, 0].tolist():
            table_row, seed, index = tensor[[Line.TABLE_ROW, Line.SEED, Line.INDEX], row].tolist()
            request = seated.get(table_row)
            if request and (seed, index - request.num_generated) in [
                (request.seed, 0),
                (request.seed, 1),
            ]:
                found[row] = request
        return found

    def check_tiles(self, tensor, running):
        """What rows read together is what each would read by itself."""
        lines = tensor[[Line.TILE_FIRST, Line.TILE_COUNT]].T.tolist()
        for first, count in lines:
            for row in set(range(first, first + count)) & set(running):
                for position in range(int(tensor[Line.NUM_SHARED, first])):
                    shared = self.place(int(tensor[Line.TABLE_ROW, first]), position)
                    assert shared == self.place(running[row].table_row, position)
