"""Allocate blocks to sequences, match shared prefixes and remember filled blocks.

A prefix is a chain of full blocks. A link is keyed by the policy version, its parent link and the
block's tokens, compared exactly: no hash can collide, and a prefix of another version is never
matched. The key of an image token also has a hash of the pixels. Sequences whose keys differ
because of their length or adapter have chains from different roots. The scheduler calls it, on the
engine's thread.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from cb_rollout.engine.kv_cache.block_pool import BlockPool
from cb_rollout.engine.request import Limits, Request

ROOT = 0


class PrefixKey(NamedTuple):
    """One link of a chain."""

    policy_version: int
    parent: int
    tokens: tuple[Hashable, ...]


class PrefixCache:
    """Chains of full blocks, by policy version and tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._links: dict[PrefixKey, tuple[int, int]] = {}
        self._key_of_block: dict[int, PrefixKey] = {}
        self._last_node = ROOT

    def __len__(self) -> int:
        return len(self._links)

    def match(
        self, policy_version: int, tokens: Sequence[Hashable], root: int = ROOT
    ) -> tuple[list[int], int]:
        """Return the blocks and node of the longest match that leaves the last token to compute."""
        size = self._block_size
        node = root
        blocks: list[int] = []
        for start in range(0, len(tokens) - size, size):
            key = PrefixKey(policy_version, node, tuple(tokens[start : start + size]))
            if key not in self._links:
                break
            block, node = self._links[key]
            blocks.append(block)
        return blocks, node

    def insert(
        self, policy_version: int, parent: int, tokens: Sequence[Hashable], block: int
    ) -> tuple[int, bool]:
        """Add a link; return its node, and False if an earlier block stores it, else True."""
        key = PrefixKey(policy_version, parent, tuple(tokens))
        if key in self._links:
            return self._links[key][1], False
        self._last_node += 1
        self._links[key] = (block, self._last_node)
        self._key_of_block[block] = key
        return self._last_node, True

    def forget(self, block: int) -> None:
        del self._links[self._key_of_block.pop(block)]

    def clear(self) -> list[int]:
        """Remove every link; return the blocks that held them."""
        blocks = list(self._key_of_block)
        self._links.clear()
        self._key_of_block.clear()
        return blocks


class BlockManager:
    """The blocks of a cache, under one policy version at a time."""

    def __init__(self, limits: Limits, grow: Callable[[int], int], policy_version: int) -> None:
        """Start without blocks; `grow` adds blocks as memory allows, and returns the new total."""
        self.limits = limits
        self.policy_version = policy_version
        self.prefixes = PrefixCache(limits.block_size)
        self.pool = BlockPool(0, on_evict=self.prefixes.forget)
        self._grow = grow
        self._root_numbers: dict[tuple[str | None, int], int] = {}
        """Number of the root of each adapter and rotary side."""

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)

    def secure(self, count: int) -> bool:
        """Make `count` blocks available, growing the pool if needed; return whether they are."""
        num_missing = count - self.pool.num_available
        if num_missing > 0:
            self.pool.grow(max(self.pool.num_blocks, self._grow(num_missing)))
        return count <= self.pool.num_available

    def allocate_prompt(self, request: Request, num_spare: int) -> bool:
        """Allocate blocks for all tokens of a sequence, sharing those of a cached prefix.

        Sets the request's blocks and the count of its computed tokens. `num_spare` blocks must stay
        available. Returns False, without allocating, if there are not enough.
        """
        request.rope_side = self.limits.rope_side(request.num_tokens)
        shared, node = self._matched(request)
        self.pool.share(shared)
        num_new = self.num_needed(request.num_tokens) - len(shared)
        if not self.secure(num_new + num_spare):
            self.pool.release(shared)
            return False
        request.block_ids = shared + self.pool.allocate(num_new)
        request.prefix_node = node
        request.num_remembered = len(shared)
        request.num_computed = len(shared) * self.limits.block_size
        return True

    def _matched(self, request: Request) -> tuple[list[int], int]:
        if not self.limits.can_match_prefixes:
            return [], ROOT
        keys = request.cache_keys(0, request.num_tokens)
        root = self._root(request)
        while True:
            shared, node = self.prefixes.match(self.policy_version, keys, root)
            num_found = len(shared) * self.limits.block_size
            images = request.images
            num_resumable = num_found if images is None else images.num_resumable(num_found)
            if num_resumable == num_found:
                return shared, node
            # Whole blocks before an image may end inside the previous image.
            keys = keys[: num_resumable + 1]

    def _root(self, request: Request) -> int:
        """Return the root of the chains whose keys are valid for this sequence."""
        numbers = self._root_numbers
        number = numbers.setdefault((request.params.adapter, request.rope_side), len(numbers))
        return ROOT - number

    def allocate_fork(self, follower: Request, leader: Request, num_spare: int) -> bool:
        """Share the full blocks of the leader's prompt, and allocate the follower's others."""
        num_shared = 0
        if self.limits.can_share_blocks:
            num_shared = len(leader.prompt_ids) // self.limits.block_size
        num_own = len(leader.block_ids) - num_shared
        if not self.secure(num_own + num_spare):
            return False
        shared = leader.block_ids[:num_shared]
        self.pool.share(shared)
        follower.block_ids = shared + self.pool.allocate(num_own)
        follower.rope_side = leader.rope_side
        return True

    def extend(self, request: Request, num_tokens: int) -> list[tuple[int, int, int]] | None:
        """Allocate the missing blocks of a running sequence for this many tokens.

        Returns each as (table row, index within the sequence, block); None, without allocating, if
        there are not enough.
        """
        num_held = len(request.block_ids)
        num_missing = self.num_needed(num_tokens) - num_held
        if num_missing > 0:
            if not self.secure(num_missing):
                return None
            request.block_ids += self.pool.allocate(num_missing)
        new = enumerate(request.block_ids[num_held:], num_held)
        return [(request.table_row, index, block) for index, block in new]

    def extend_ahead(self, requests: Sequence[Request]) -> list[tuple[int, int, int]] | None:
        """Allocate a slot for the next token of each running sequence; see `extend`."""
        size = self.limits.block_size
        # This runs for every row of every step.
        short = [r for r in requests if len(r.token_ids) >= size * len(r.block_ids)]
        if not self.secure(len(short)):
            return None
        entries: list[tuple[int, int, int]] = []
        for request in short:
            # `extend` does not return None: enough blocks are available.
            entries += self.extend(request, request.num_tokens + 1) or ()
        return entries

    def remember(self, request: Request) -> None:
        if not self.limits.can_match_prefixes or request.has_old_keys:
            return
        size = self.limits.block_size
        while (request.num_remembered + 1) * size <= request.num_computed:
            start = request.num_remembered * size
            block = request.block_ids[request.num_remembered]
            tokens = request.cache_keys(start, start + size)
            request.prefix_node, is_holder = self.prefixes.insert(
                self.policy_version, request.prefix_node, tokens, block
            )
            if is_holder:
                self.pool.remember(block)
            request.num_remembered += 1

    def begin_policy_version(self, policy_version: int) -> None:
        """Clear the prefix cache, so that no earlier block is matched again."""
        self.policy_version = policy_version
        self.pool.forget(self.prefixes.clear())
