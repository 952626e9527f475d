"""Find the blocks that hold the keys of a prefix, a chain of full blocks.

A link is keyed by the policy version, its parent link and the block's tokens, compared exactly: no
hash can collide, and a prefix of another version is never matched. A token of an image also has a
hash of the pixels. Sequences whose keys differ by their length have chains from different roots.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

ROOT = 0


def root_of(rope_side: int) -> int:
    """Return the first node of the chains of one `Limits.rope_side`."""
    return ROOT - rope_side


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
        """Return the longest chain's blocks and node, where the last token is to be computed."""
        size, node = self._block_size, root
        blocks = []
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
        """Add a link; return its node, and whether `block` holds it, and no other already did."""
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
