"""Remember which workers have computed the keys of which prefix.

Owns a table of hashes: a worker's KV cache may have dropped what the table names, and a collision
costs a prefill. So it decides where a sequence runs, never what is sampled. Holds no lock; its
caller does.
"""

from collections.abc import Collection, Iterator, Sequence

# Tokens of a link of a prefix.
CHUNK_TOKENS = 32

# Links that are remembered, the latest: prefixes of two million tokens.
MAX_LINKS = 1 << 16


class PrefixRoutes:
    """Workers by prefix; a prefix is a chain of chunks of tokens under one policy version."""

    def __init__(self, max_links: int = MAX_LINKS) -> None:
        self._max_links = max_links
        # The links used last are at the end.
        self._workers: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, worker: int, version: int, tokens: Sequence[int]) -> None:
        """Note that a worker has computed the keys of `tokens` under a policy version."""
        for link in _links(version, tokens):
            holders = self._workers.pop(link, set())
            holders.add(worker)
            self._workers[link] = holders
        while len(self._workers) > self._max_links:
            del self._workers[next(iter(self._workers))]

    def longest(
        self, workers: Collection[int], version: int, tokens: Sequence[int]
    ) -> tuple[int, Collection[int]]:
        """Find the longest known prefix of `tokens` among `workers`.

        Returns:
            Its tokens, and the workers that have its keys; (0, workers) if none is known.
        """
        num_links = 0
        for link in _links(version, tokens):
            holders = self._workers.get(link, set()).intersection(workers)
            if not holders:
                break
            num_links, workers = num_links + 1, holders
        return num_links * CHUNK_TOKENS, workers


def _links(version: int, tokens: Sequence[int]) -> Iterator[int]:
    """Yield the hash of each full chunk together with those before it."""
    link = hash(version)
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        link = hash((link, *tokens[start : start + CHUNK_TOKENS]))
        yield link
