"""Keep the completions that a run's earlier rollouts sampled for each prompt, in bounded memory.

Drafts are looked up in them, and their lengths tell how long a sequence will probably be. Handles
tokens, never tensors. Called by the thread that steps the engine.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens of all completions together, 4 bytes each; the prompts that waited longest are dropped.
MAX_TOKENS = 1 << 22

# Completions of a prompt: two rollouts of a group of eight.
MAX_COMPLETIONS = 16


class PromptHistory:
    """Completions of a prompt, the newest last."""

    __slots__ = ("completions", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key
        """The prompt's token ids, 4 bytes each."""
        self.completions: deque[array[int]] = deque()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions))

    def expected_length(self) -> float | None:
        """Return the mean number of tokens of a completion; None: none has ended yet."""
        return self.num_tokens / len(self.completions) if self.completions else None


class CompletionHistory:
    """Completions of the latest prompts of an engine."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens, self.num_tokens = max_tokens, 0
        self._prompts: OrderedDict[bytes, PromptHistory] = OrderedDict()

    def of(self, prompt_ids: Sequence[int]) -> PromptHistory:
        key = array("i", prompt_ids).tobytes()
        return self._prompts.get(key) or PromptHistory(key)

    def add(self, prompt: PromptHistory, token_ids: Sequence[int]) -> None:
        """Add a completion that has ended; drop the oldest beyond the limits."""
        known = self._prompts.setdefault(prompt.key, prompt)
        self._prompts.move_to_end(known.key)
        known.completions.append(array("i", token_ids))
        self.num_tokens += len(token_ids)
        while len(known.completions) > MAX_COMPLETIONS:
            self.num_tokens -= len(known.completions.popleft())
        while self.num_tokens > self._max_tokens:
            _, dropped = self._prompts.popitem(last=False)
            self.num_tokens -= dropped.num_tokens
            # Requests that hold it add to it later, and are counted from nothing.
            dropped.completions.clear()
