"""The real scheduler, executor and graphs on a model whose keys record their origin."""

from collections import Counter
from operator import add
from types import SimpleNamespace

import pytest
import torch

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.attention.triton.backend import KernelForms
from cb_rollout.engine.cuda_graphs.decode_path import CudaGraphDecoding
from cb_rollout.engine.cuda_graphs.graphs import GraphedDecoding
from cb_rollout.engine.cuda_graphs.inputs import Line
from cb_rollout.engine.decode.context import StepContext
from cb_rollout.engine.decode.stepwise import StepwiseDecoding
from cb_rollout.engine.executor import StepExecutor
from cb_rollout.engine.kv_cache.paged import BlockTable
from cb_rollout.engine.model.runner import BatchLayout
from cb_rollout.engine.request import NO_TABLE_ROW, Request
from cb_rollout.engine.sampling.sampler import HostSampled, append_row
from cb_rollout.engine.scheduler import scheduler as scheduling
from cb_rollout.engine.scheduler.scheduler import Scheduler
from cb_rollout.metrics.registry import EngineCounters
from cb_rollout.types import FinishReason, RequestStatus

CPU = torch.device("cpu")

# Far more than any run needs; a run that takes longer starves a sequence.
MAX_STEPS = 3000


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


def expected_token(seed, index):
    return (seed + index) % 2


def expected_logprob(index, version):
    """A number that tells under which policy a token was sampled, and where."""
    return -float(index + 100 * version)


class FakeSampler:
    def forget_rows(self):
        pass

    def extend(self, requests, logits_BV, version, *, is_recurring):
        assert len(logits_BV) == len(requests)
        places = [(request.seed, request.num_generated) for request in requests]
        logprobs = [expected_logprob(index, version) for _, index in places]
        tokens = [expected_token(*place) for place in places]
        results = HostSampled(tokens, logprobs, [True] * len(requests))
        return self.append(requests, results, version)

    def append(self, requests, results, version):
        return sum(append_row(r, results, row, version) for row, r in enumerate(requests))


class CheckedScheduler(Scheduler):
    def schedule_prefill(self):
        chosen, limits = super().schedule_prefill(), self.limits
        total = sum if limits.is_packed else lambda sizes: max(sizes) * len(sizes)
        if len(chosen) > 1:
            num_computed = [prefill.leader.num_computed for prefill in chosen]
            num_new = [prefill.num_scheduled for prefill in chosen]
            assert total(num_new) <= self.max_batch_tokens
            if any(num_computed):
                num_keys = list(map(add, num_computed, num_new))
                assert total(num_keys) <= scheduling.MAX_GATHER_RATIO * self.max_batch_tokens
        for prefill in chosen:
            assert prefill.num_scheduled > 0
            if limits.can_resume_prompts:
                assert prefill.num_scheduled <= limits.max_batch_tokens
            else:
                assert prefill.leader.num_computed == 0
                assert prefill.num_scheduled == prefill.leader.num_tokens
            num_shared = len(prefill.leader.prompt_ids) // limits.block_size
            num_shared *= limits.can_share_blocks
            for follower in prefill.followers:
                assert follower.prompt_ids == prefill.leader.prompt_ids
                mine, theirs = follower.block_ids, prefill.leader.block_ids
                assert mine[:num_shared] == theirs[:num_shared]
                assert not set(mine[num_shared:]) & set(theirs)
        return chosen


class FakeOffloader:
    """Keeps the keys of so many sequences, and of every third one none that come back."""

    def __init__(self, model, room):
        self.model, self.room, self.kept = model, room, {}
        self.speeds = SimpleNamespace(record_prefill=lambda num_tokens, seconds: None)
        self.num_restores = 0

    def holds(self, request):
        return request.seed in self.kept

    def save(self, request, policy_version):
        assert policy_version == self.model.version
        if request.has_old_keys or not self.room:
            return False
        if len(self.kept) >= self.room:
            self.kept[next(iter(self.kept))] = None
        slots = [self.model.slot(request.table_row, i) for i in range(request.num_computed)]
        self.kept[request.seed] = policy_version, [self.model.keys.get(slot) for slot in slots]
        return True

    def restore(self, request, policy_version):
        kept = self.kept.pop(request.seed)
        self.num_restores += 1
        if kept is None or self.num_restores % 3 == 0:
            return False
        version, keys = kept
        assert version == policy_version
        size = self.model.limits.block_size
        for position in range(request.num_computed, len(keys)):
            block = request.block_ids[position // size]
            self.model.keys[block, position % size] = keys[position]
        request.num_computed = len(keys)
        return True

    def drop(self, request):
        self.kept.pop(request.seed, None)

    def clear(self):
        self.kept.clear()

    release = clear


class FakeModel:
    """Runner and storage of one engine; a key is the policy, the set of rotary factors and all
    tokens that it depends on.

    A forward that would read a wrong, moved, overwritten or outdated key is noted in `faults`.
    """

    device, batch_layout, attention_backend, is_split = CPU, BatchLayout.PADDED, None, False
    layout = SimpleNamespace(is_recurrent=False)

    def __init__(
        self, limits, num_blocks, max_blocks, *, has_graphs=False, policy="fifo", host_room=0
    ):
        self.limits, self.max_blocks = limits, max_blocks
        self.counters = EngineCounters()
        self.scheduler = CheckedScheduler(limits, self.counters, self.grow, policy)
        self.scheduler.offloader = FakeOffloader(self, host_room)
        context = StepContext(
            runner=self,
            scheduler=self.scheduler,
            storage=self,
            token_sampler=FakeSampler(),
            counters=self.counters,
        )
        self.graphs = self._graphs() if has_graphs else None
        path = self._graphed() if has_graphs else StepwiseDecoding(self)
        self.executor = StepExecutor(context, path)
        self.requests, self.faults, self.num_ahead, self.error = [], [], 0, None
        self.cache = self
        self.reset(num_blocks)

    def reset(self, num_blocks):
        """Release the cache, and take a new one of so many blocks."""
        self.keys = {}
        self.table = BlockTable(self.limits.max_requests, self.limits.block_size, CPU)
        self.scheduler.reset(self.limits)
        self.scheduler.pool.grow(num_blocks)
        self.executor.reset(self.executor.decode_path)

    def add(self, *requests):
        for request in requests:
            # A seed that no other has: a graph knows seed and place, and so the token.
            request.seed = len(self.requests)
            self.requests.append(request)
            self.scheduler.add(request)

    def cancel(self, request):
        request.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
        self.scheduler.retire(request)

    def preempt_youngest(self):
        """Preempt it as a decode step without blocks does."""
        youngest = self.scheduler.running[-1]
        self.scheduler._offload(youngest)
        self.scheduler.preempt([youngest])

    def grow(self, count):
        now = self.scheduler.pool.num_blocks
        return max(now, min(self.max_blocks, max(2 * now, now + count)))

    @property
    def version(self):
        return self.scheduler.blocks.policy_version

    def step(self):
        """Run one forward; whether any could run."""
        touched = self.executor.run()
        self.scheduler.retire_running()
        assert not self.faults
        return touched is not None

    def drain(self):
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("some sequence starves")

    def is_sound(self):
        return True

    def logits(self, batch):
        self.raise_error()
        admitted = {r.table_row: r for r in self.requests if r.table_row != NO_TABLE_ROW}
        for tokens, length, table_row in zip(
            batch.new_tokens, batch.lengths, batch.table_rows, strict=True
        ):
            request = admitted[table_row]
            if request.num_computed + len(tokens) != length:
                self.faults.append("a forward would leave a gap in the keys")
            self.compute(request, length)
        return torch.zeros(len(batch), 2)

    def raise_error(self):
        error, self.error = self.error, None
        if error is not None:
            raise error

    def compute(self, request, end):
        """Do what a forward does: read every cached key, then write the keys of the new tokens."""
        known = [*request.token_ids, expected_token(request.seed, request.num_generated)]
        # A key that was computed from kept keys belongs to no version, and to one sequence alone.
        origin = request.request_id if request.has_old_keys else self.version
        side = self.limits.rope_side(max(end, request.num_tokens))
        for position in range(end):
            slot = self.slot(request.table_row, position)
            tokens = (side, *known[: position + 1])
            if position >= request.num_computed:
                self.keys[slot] = (origin, *tokens)
                continue
            stored_origin, *stored = self.keys.get(slot, (None,))
            if tuple(stored) != tokens:
                self.faults.append("a forward would read another token's key")
            is_kept = request.has_old_keys and isinstance(stored_origin, int)
            if not is_kept and stored_origin != origin:
                self.faults.append("a forward would read an outdated key")

    def slot(self, table_row, position):
        size = self.limits.block_size
        return int(self.table.blocks[table_row, position // size]), position % size

    def copy_blocks(self, sources, targets):
        for source, target in zip(sources, targets, strict=True):
            for offset in range(self.limits.block_size):
                self.keys[target, offset] = self.keys.get((source, offset))

    def copy_states(self, sources, targets):
        assert len(sources) == len(targets)

    def check(self):
        """Check what holds between any two calls."""
        pool = self.scheduler.pool
        admitted = [request for request in self.requests if request.table_row != NO_TABLE_ROW]
        held = Counter(block for request in admitted for block in request.block_ids)
        assert held == {b: n for b, n in enumerate(pool._reference_counts) if n}
        assert pool.num_used == len(held)
        rows = [request.table_row for request in admitted] + self.scheduler._free_table_rows
        assert sorted(rows) == list(range(self.limits.max_requests))
        unfinished = [request for request in self.requests if not request.status.is_final]
        assert len(self.scheduler.waiting) == len(unfinished) - len(admitted)
        assert self.scheduler.has_work == bool(unfinished)
        waiting = {request.seed for request in self.scheduler.waiting}
        assert set(self.scheduler.offloader.kept) <= waiting
        for request in self.requests:
            assert request.num_computed <= request.num_tokens
            assert request.table_row != NO_TABLE_ROW or not request.block_ids
            tokens = [expected_token(request.seed, i) for i in range(request.num_generated)]
            assert request.token_ids == [*request.prompt_ids, *tokens]
            versions = [version for version, n in request.policy_versions for _ in range(n)]
            logprobs = [expected_logprob(*at) for at in enumerate(versions)]
            assert request.logprobs == logprobs
            assert len(versions) == request.num_generated

    # Graphs. A step runs when it is launched. It knows its buffers and the block table, and nothing
    # of sequences: a row that stays in the buffers writes its key, whoever has the block by then.

    def _graphs(self):
        decoding = SimpleNamespace(
            find=lambda cache, table: None,
            is_cut=lambda lengths: False,
            rows_per_tile=3,
            rows_that_share=3,
            forms=KernelForms(),
            cache=SimpleNamespace(is_recurrent=False),
        )
        graphs = GraphedDecoding(
            self, decoding, self.limits.max_requests, capture=lambda step: self.replay
        )
        for key in graphs._row_keys:
            graphs.add(key, self.limits.block_size)
        return graphs

    def _graphed(self):
        """Graphed steps, which count those that were launched ahead."""
        path = CudaGraphDecoding(self, self.graphs, self.limits.block_size, looks_ahead=True)
        launched = path.launched

        def counted():
            running = launched()
            self.num_ahead += bool(running)
            return running

        path.launched = counted
        return path

    def replay(self):
        self.raise_error()
        tensor, results_N6 = self.graphs._inputs.tensor, self.graphs._sampler.results
        running = self.running_rows()
        if len({request.rope_side for request in running.values()}) > 1:
            self.faults.append("a graph would take one set of rotary factors for all rows")
        for row in (tensor[Line.LENGTH] > 0).nonzero()[:, 0].tolist():
            lines = [Line.LENGTH, Line.TABLE_ROW, Line.SEED, Line.INDEX]
            length, table_row, seed, index = tensor[lines, row].tolist()
            if row not in running:
                self.keys[self.slot(table_row, length - 1)] = ("nobody",)
            elif length != len(running[row].prompt_ids) + index:
                self.faults.append("a row of the buffers has another length than its sequence")
            elif index >= running[row].max_new_tokens:
                self.faults.append("a sequence runs past its length")
            else:
                self.compute(running[row], length)
            logprob = expected_logprob(index, self.version)
            results_N6[row, :4] = torch.tensor([expected_token(seed, index), logprob, 1, 1])
        self.check_tiles(tensor, running)
        tensor[Line.LENGTH] += tensor[Line.LENGTH] > 0
        tensor[Line.INDEX] += 1

    def running_rows(self):
        """The sequence of each row of the buffers whose sequence still runs."""
        tensor = self.graphs._inputs.tensor
        admitted = {r.table_row: r for r in self.requests if r.table_row != NO_TABLE_ROW}
        found = {}
        for row in (tensor[Line.LENGTH] > 0).nonzero()[:, 0].tolist():
            table_row, seed, index = tensor[[Line.TABLE_ROW, Line.SEED, Line.INDEX], row].tolist()
            request = admitted.get(table_row)
            if request and seed == request.seed and index - request.num_generated in (0, 1):
                found[row] = request
        return found

    def check_tiles(self, tensor, running):
        """Check that what rows read together is what each would read by itself."""
        for first, count in tensor[[Line.TILE_FIRST, Line.TILE_COUNT]].T.tolist():
            for row in set(range(first, first + count)) & set(running):
                for position in range(int(tensor[Line.NUM_SHARED, first])):
                    shared = self.slot(int(tensor[Line.TABLE_ROW, first]), position)
                    if shared != self.slot(running[row].table_row, position):
                        self.faults.append("a tile would read another sequence's keys")
