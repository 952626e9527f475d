"""Keep the lengths of the completions that earlier rollouts of a run sampled for each prompt.

They tell how long a sequence will probably be. Called by the thread that steps the engine.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# The prompts that waited longest are dropped.
MAX_PROMPTS = 1 << 16

# Completions of a prompt: two rollouts of a group of eight.
MAX_COMPLETIONS = 16


class CompletionHistory:
    """Lengths of the latest completions of an engine, by prompt."""

    def __init__(self) -> None:
        self._lengths: OrderedDict[bytes, deque[int]] = OrderedDict()

    def expected_length(self, prompt_ids: Sequence[int]) -> float | None:
        """Return the mean number of tokens of a completion; None: none has ended yet."""
        lengths = self._lengths.get(_key(prompt_ids))
        return sum(lengths) / len(lengths) if lengths else None

    def add(self, prompt_ids: Sequence[int], num_tokens: int) -> None:
        """Add a completion that has ended."""
        key = _key(prompt_ids)
        self._lengths.setdefault(key, deque(maxlen=MAX_COMPLETIONS)).append(num_tokens)
        self._lengths.move_to_end(key)
        if len(self._lengths) > MAX_PROMPTS:
            self._lengths.popitem(last=False)


def _key(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", prompt_ids), digest_size=16).digest()
