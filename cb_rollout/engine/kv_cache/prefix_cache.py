"""Which block already holds the keys of a prefix, and under which policy they were computed.

A prefix is a chain of full blocks. Each link is looked up by the policy version, the link before it
and the block's own tokens, all compared exactly: no hash can collide, and a prefix of another
policy version is a different key, so it cannot be matched whoever still holds its block.
"""

from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0


class PrefixKey(NamedTuple):
    """One link of a chain."""

    policy_version: int
    parent: int
    token_ids: tuple[int, ...]


class PrefixCache:
    """Maps chains of full blocks to the blocks that hold them."""

    def __init__(self, block_size: int) -> None:
        """Start empty."""
        self._block_size = block_size
        self._links: dict[PrefixKey, tuple[int, int]] = {}
        self._key_of_block: dict[int, PrefixKey] = {}
        self._last_node = ROOT

    def __len__(self) -> int:
        return len(self._links)

    def match(self, policy_version: int, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """The longest known chain of `token_ids`, short of its last token, which must be computed.

        Returns:
            The blocks that hold it, and its last node.
        """
        size, node = self._block_size, ROOT
        blocks = []
        for start in range(0, len(token_ids) - size, size):
            key = PrefixKey(policy_version, node, tuple(token_ids[start : start + size]))
            if key not in self._links:
                break
            block, node = self._links[key]
            blocks.append(block)
        return blocks, node

    def insert(
        self, policy_version: int, parent: int, token_ids: Sequence[int], block: int
    ) -> tuple[int, bool]:
        """Add the link of one full block.

        Returns:
            The link's node, and whether `block` is what holds it (else another block already did).
        """
        key = PrefixKey(policy_version, parent, tuple(token_ids))
        if key in self._links:
            return self._links[key][1], False
        self._last_node += 1
        self._links[key] = (block, self._last_node)
        self._key_of_block[block] = key
        return self._last_node, True

    def forget(self, block: int) -> None:
        """Remove the link that `block` holds."""
        del self._links[self._key_of_block.pop(block)]

    def clear(self) -> list[int]:
        """Remove every link, returning the blocks that held them."""
        blocks = list(self._key_of_block)
        self._links.clear()
        self._key_of_block.clear()
        return blocks
