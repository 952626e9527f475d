import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cb_rollout.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool


class PoolAgainstAModel(RuleBasedStateMachine):
    """The model has reference counts, the remembered blocks, and the idle ones, oldest first."""

    def __init__(self):
        super().__init__()
        self.evicted = []
        self.pool = BlockPool(3, on_evict=self.evicted.append)
        self.num_blocks = 3
        self.references = {}
        self.remembered = set()
        self.idle = []

    @property
    def num_free(self):
        return self.num_blocks - len(self.references) - len(self.idle)

    @rule(data=st.data())
    def allocate(self, data):
        count = data.draw(st.integers(0, self.pool.num_available))
        num_evicted = max(0, count - self.num_free)
        expected_evictions, self.idle = self.idle[:num_evicted], self.idle[num_evicted:]
        self.evicted.clear()
        blocks = self.pool.allocate(count)
        assert self.evicted == expected_evictions
        assert blocks[count - num_evicted :] == expected_evictions
        assert len(set(blocks)) == count
        assert not set(blocks) & (self.references.keys() | set(self.idle) | {NULL_BLOCK})
        assert all(1 <= block <= self.num_blocks for block in blocks)
        self.remembered -= set(blocks)
        self.references |= dict.fromkeys(blocks, 1)

    @precondition(lambda self: self.references or self.idle)
    @rule(data=st.data())
    def share(self, data):
        held = [*self.references, *self.idle]
        blocks = data.draw(st.lists(st.sampled_from(held), max_size=4))
        self.pool.share(blocks)
        for block in blocks:
            if block in self.idle:
                self.idle.remove(block)
            self.references[block] = self.references.get(block, 0) + 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def release(self, data):
        blocks = data.draw(st.lists(st.sampled_from([*self.references]), max_size=4, unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.references[block] -= 1
            if self.references[block] == 0:
                del self.references[block]
                if block in self.remembered:
                    self.idle.append(block)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def remember(self, data):
        block = data.draw(st.sampled_from([*self.references]))
        self.pool.remember(block)
        self.remembered.add(block)

    @rule(data=st.data())
    def forget(self, data):
        every_block = st.integers(1, self.num_blocks)
        blocks = data.draw(st.lists(every_block, max_size=4, unique=True))
        self.pool.forget(blocks)
        self.remembered -= set(blocks)
        self.idle = [block for block in self.idle if block not in blocks]

    @precondition(lambda self: self.num_blocks < 10)
    @rule(more=st.integers(0, 3))
    def grow(self, more):
        self.num_blocks += more
        self.pool.grow(self.num_blocks)

    @invariant()
    def every_block_is_used_idle_or_free(self):
        assert self.pool.num_blocks == self.num_blocks
        assert self.pool.num_used == len(self.references)
        assert self.pool.num_available == self.num_free + len(self.idle)

    def teardown(self):
        self.evicted.clear()
        for block, count in self.references.items():
            for _ in range(count):
                self.pool.release([block])
        assert self.pool.num_used == 0
        everything = self.pool.allocate(self.num_blocks)
        assert sorted(everything) == list(range(1, self.num_blocks + 1))
        assert set(self.evicted) == self.remembered


test_the_pool_agrees_with_a_model = PoolAgainstAModel.TestCase


def pool_of(num_blocks):
    return BlockPool(num_blocks, on_evict=lambda block: pytest.fail(f"evicted {block}"))


def test_an_empty_pool_allocates_nothing():
    pool = pool_of(0)
    assert pool.allocate(0) == []
    assert pool.num_available == pool.num_used == 0


def test_more_blocks_than_there_are_cannot_be_allocated():
    pool = pool_of(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="more blocks than there are"):
        pool.allocate(2)


def test_a_failed_allocation_takes_nothing():
    pool = pool_of(2)
    with pytest.raises(AssertionError, match="more blocks than there are"):
        pool.allocate(3)
    assert pool.num_available == 2


def test_a_block_cannot_be_released_twice():
    pool = pool_of(1)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[0]} released twice"):
        pool.release(blocks)


def test_only_a_block_in_use_can_be_remembered():
    pool = pool_of(1)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="only a block in use"):
        pool.remember(block)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(KeyError):
        pool_of(1).share([1])


def test_the_null_block_is_never_allocated():
    assert NULL_BLOCK not in pool_of(50).allocate(50)


def test_a_shared_block_is_used_until_its_last_release():
    pool = pool_of(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0


def test_the_block_idle_longest_is_evicted_first():
    evicted = []
    pool = BlockPool(3, on_evict=evicted.append)
    first, second, third = pool.allocate(3)
    for block in (first, second, third):
        pool.remember(block)
    pool.release([second, third, first])
    pool.share([second])
    pool.release([second])
    assert pool.allocate(3) == [third, first, second]
    assert evicted == [third, first, second]


def test_a_free_block_is_allocated_before_an_idle_one():
    pool = pool_of(2)
    idle, free = pool.allocate(2)
    pool.remember(idle)
    pool.release([idle, free])
    assert pool.allocate(1) == [free]
