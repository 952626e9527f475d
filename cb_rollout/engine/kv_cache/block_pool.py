"""Count the references to KV cache blocks. Holds neither tokens nor tensors."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

# Never allocated, always zeros: padding reads it.
NULL_BLOCK = 0


class BlockPool:
    """Blocks `1 .. num_blocks`, each free, in use by `n` sequences, or idle.

    An idle block has no reference but is remembered: it can be shared again as it is, or be evicted
    for other contents, the longest idle first.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        """Start with every block free; `on_evict` is called with each evicted block."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = deque(range(1, num_blocks + 1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._reference_counts = [0] * (num_blocks + 1)
        self._remembered: set[int] = set()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; the caller checks `num_available`."""
        assert count <= self.num_available, "allocate more blocks than there are"
        blocks = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            self._remembered.discard(block)
            self._on_evict(block)
            blocks.append(block)
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._reference_counts[block] == 0:
                del self._idle[block]
            self._reference_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference; a block without one becomes idle if remembered, otherwise free."""
        for block in blocks:
            self._reference_counts[block] -= 1
            assert self._reference_counts[block] >= 0, f"block {block} released twice"
            if self._reference_counts[block] == 0:
                if block in self._remembered:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def remember(self, block: int) -> None:
        """Keep this block's contents after its last reference is dropped."""
        assert self._reference_counts[block] > 0, "only a block in use can be remembered"
        self._remembered.add(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Stop remembering blocks; idle ones become free."""
        for block in blocks:
            self._remembered.discard(block)
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def grow(self, num_blocks: int) -> None:
        self._free.extend(range(self.num_blocks + 1, num_blocks + 1))
        self._reference_counts.extend([0] * (num_blocks - self.num_blocks))
        self.num_blocks = num_blocks
