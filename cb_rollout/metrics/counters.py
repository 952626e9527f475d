"""What the engine counts, and the rates that follow. Arithmetic only."""

from dataclasses import asdict, dataclass, fields


@dataclass(slots=True)
class EngineCounters:
    """Running totals since the engine was made; differences of two copies describe a rollout."""

    requests_finished: int = 0
    tokens_generated: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that went through a forward."""
    prefill_tokens_saved: int = 0
    """Prompt tokens that did not, because a group or a known prefix had them already."""
    preemptions: int = 0
    prefill_forwards: int = 0
    decode_forwards: int = 0
    drafted_tokens: int = 0
    """Tokens that were guessed, and checked in a decode forward."""
    accepted_tokens: int = 0
    """How many of them were sampled, so that no forward of their own was needed."""
    truncated_tokens: int = 0
    """Tokens that were sampled under top-k, top-p or min-p."""
    kept_tokens: int = 0
    """How many token ids those were chosen from, all together."""
    log_kept_mass: float = 0.0
    """Logarithms of the probability that was left to them, all together."""
    kv_blocks_peak: int = 0
    """Most blocks in use at once; a maximum, not a sum."""

    def since(self, earlier: "EngineCounters") -> "EngineCounters":
        """What was added after `earlier`; the peak is carried over."""
        difference = {
            field.name: getattr(self, field.name) - getattr(earlier, field.name)
            for field in fields(self)
        }
        return EngineCounters(**(difference | {"kv_blocks_peak": self.kv_blocks_peak}))

    def copy(self) -> "EngineCounters":
        """These totals now."""
        return EngineCounters(**asdict(self))


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of an engine at one moment."""

    requests_running: int
    requests_waiting: int
    kv_blocks_used: int
    kv_blocks: int
    kv_bytes: int
    policy_version: int
