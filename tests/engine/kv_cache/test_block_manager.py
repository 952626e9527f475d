import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cb_rollout.engine.kv_cache.block_manager import ROOT, PrefixCache

TOKENS = st.lists(st.integers(0, 1), max_size=8)
VERSIONS = st.integers(0, 2)
# A token of no chain: after a sequence, it lets the whole sequence match.
UNKNOWN = 99


def insert_chain(index, version, token_ids, size, blocks):
    """Insert the full blocks of a sequence one after the other, as the scheduler does."""
    node = ROOT
    for position, block in enumerate(blocks):
        chunk = token_ids[position * size : (position + 1) * size]
        node, _ = index.insert(version, node, chunk, block)
    return node


class IndexAgainstAModel(RuleBasedStateMachine):
    """The model maps whole prefixes to blocks; forgetting one hides all that extend it."""

    @initialize(size=st.integers(1, 3))
    def start(self, size):
        self.size = size
        self.index = PrefixCache(size)
        self.known = {}
        self.hidden = set()
        self.num_blocks = 0

    @rule(version=VERSIONS, token_ids=TOKENS)
    def insert(self, version, token_ids):
        blocks, node = self.index.match(version, [*token_ids, UNKNOWN])
        for start in range(len(blocks) * self.size, len(token_ids) - self.size + 1, self.size):
            end = start + self.size
            self.num_blocks += 1
            parent = node
            chunk = token_ids[start:end]
            node, is_holder = self.index.insert(version, parent, chunk, self.num_blocks)
            assert is_holder
            assert self.index.insert(version, parent, chunk, -1) == (node, False)
            self.known[version, *token_ids[:end]] = self.num_blocks

    @rule(version=VERSIONS, token_ids=TOKENS)
    def match(self, version, token_ids):
        expected = []
        for end in range(self.size, len(token_ids), self.size):
            block = self.known.get((version, *token_ids[:end]))
            if block is None:
                break
            expected.append(block)
        blocks, node = self.index.match(version, token_ids)
        assert blocks == expected
        assert len(blocks) * self.size < max(1, len(token_ids))
        assert (node == ROOT) == (not blocks)

    @precondition(lambda self: self.known or self.hidden)
    @rule(data=st.data())
    def forget(self, data):
        block = data.draw(st.sampled_from(sorted({*self.known.values(), *self.hidden})))
        self.index.forget(block)
        self.hidden.discard(block)
        for prefix in [prefix for prefix, held in self.known.items() if held == block]:
            longer = [known for known in self.known if known[: len(prefix)] == prefix]
            self.hidden |= {self.known.pop(known) for known in longer} - {block}

    @rule()
    def clear(self):
        assert sorted(self.index.clear()) == sorted({*self.known.values(), *self.hidden})
        self.known, self.hidden = {}, set()

    @invariant()
    def one_link_for_every_block(self):
        assert len(self.index) == len(self.known) + len(self.hidden)


test_the_index_agrees_with_a_model = IndexAgainstAModel.TestCase


@given(size=st.integers(1, 4), token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_last_token_is_never_matched_and_only_whole_blocks_are(size, token_ids):
    index = PrefixCache(size)
    num_full = len(token_ids) // size
    insert_chain(index, 0, token_ids, size, range(1, num_full + 1))
    blocks, _ = index.match(0, token_ids)
    assert blocks == list(range(1, (len(token_ids) - 1) // size + 1))
    longer, _ = index.match(0, [*token_ids, UNKNOWN])
    assert longer == list(range(1, num_full + 1))


@given(inserted=VERSIONS, asked=VERSIONS)
def test_a_prefix_of_another_policy_version_is_never_matched(inserted, asked):
    index = PrefixCache(2)
    node = insert_chain(index, inserted, [5, 6, 7, 8], 2, [1, 2])
    expected = ([1, 2], node) if asked == inserted else ([], ROOT)
    assert index.match(asked, [5, 6, 7, 8, 9]) == expected


def test_two_policy_versions_keep_the_same_tokens_in_their_own_blocks():
    index = PrefixCache(2)
    insert_chain(index, 0, [5, 6, 7, 8], 2, [1, 2])
    insert_chain(index, 1, [5, 6], 2, [3])
    assert index.match(0, [5, 6, 7, 8, 9])[0] == [1, 2]
    assert index.match(1, [5, 6, 7, 8, 9])[0] == [3]


def test_the_same_block_of_tokens_after_another_prefix_is_another_prefix():
    index = PrefixCache(1)
    insert_chain(index, 0, [1, 2], 1, [1, 2])
    insert_chain(index, 0, [3], 1, [3])
    assert index.match(0, [3, 2, 0])[0] == [3]
    assert index.match(0, [2, 2, 0])[0] == []


def test_tokens_with_equal_hashes_are_told_apart():
    assert hash((-1,)) == hash((-2,))
    index = PrefixCache(1)
    insert_chain(index, 0, [-1], 1, [1])
    assert index.match(0, [-2, 0]) == ([], ROOT)


def test_forgetting_a_parent_hides_its_children_even_when_the_parent_comes_back():
    index = PrefixCache(1)
    insert_chain(index, 0, [1, 2, 3], 1, [1, 2, 3])
    index.forget(1)
    assert index.match(0, [1, 2, 3, 0]) == ([], ROOT)
    insert_chain(index, 0, [1], 1, [4])
    assert index.match(0, [1, 2, 3, 0])[0] == [4]


def test_the_first_block_to_hold_a_link_keeps_it():
    index = PrefixCache(1)
    node = insert_chain(index, 0, [1], 1, [1])
    assert index.insert(0, ROOT, [1], 2) == (node, False)
    assert index.match(0, [1, 0])[0] == [1]


def test_a_block_that_holds_no_link_cannot_be_forgotten():
    with pytest.raises(KeyError):
        PrefixCache(1).forget(1)


def test_clearing_returns_every_block_once():
    index = PrefixCache(1)
    insert_chain(index, 0, [1, 2], 1, [1, 2])
    insert_chain(index, 1, [1], 1, [3])
    assert sorted(index.clear()) == [1, 2, 3]
    assert len(index) == 0
    assert index.match(0, [1, 2, 3]) == ([], ROOT)
