"""What an engine is doing now, as one line for a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cb_rollout.engine.service.manager import ContinuousBatchingManager


class LiveStatus:
    """Says how it goes; speeds are over the time since it was last asked."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        """Start counting now."""
        self._manager = manager
        self._before = manager.counters.copy()
        self._asked = time.perf_counter()

    def line(self) -> str:
        """One line, without its end."""
        status, counters, now = self._manager.status(), self._manager.counters, time.perf_counter()
        added = counters.since(self._before)
        seconds, self._asked, self._before = now - self._asked, now, counters.copy()
        parts = [
            f"policy {status.policy_version}",
            f"{status.requests_running} running, {status.requests_waiting} waiting",
            f"{added.tokens_generated / seconds:,.0f} tokens/s",
            f"{status.kv_blocks_used:,} of {status.kv_blocks:,} blocks",
        ]
        prompt_tokens = added.prefill_tokens + added.prefill_tokens_saved
        if prompt_tokens:
            share = added.prefill_tokens_saved / prompt_tokens
            parts.append(f"{share:.0%} of prompts known")
        return " | ".join(parts)
