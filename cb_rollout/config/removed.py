"""List removed settings: when each was removed, and what to use instead. Loads no torch.

A setting that came back is not listed. Tests check that none of these names is a setting.
"""

from typing import NamedTuple


class Removed(NamedTuple):
    """A removed setting."""

    when: str
    """Before or after which release it was removed, such as "after 0.3.0"."""
    advice: str

    @property
    def sentence(self) -> str:
        return f"it was removed {self.when}: {self.advice}"


_TRUNCATION = "pass transformers' own processor in logits_processors, or use min_p"

# By name of the field, whichever settings it belonged to.
SETTINGS = {
    "num_speculative_tokens": Removed(
        "after 0.3.0", "n-gram drafts were right for one token in a hundred; leave it out"
    ),
    "encoder_cache_gib": Removed(
        "after 0.3.0", "an image is encoded again when its prompt is recomputed; leave it out"
    ),
    "typical_p": Removed("after 0.3.0", _TRUNCATION),
    "encoder_repetition_penalty": Removed("after 0.3.0", _TRUNCATION),
    "exponential_decay_length_penalty": Removed("after 0.3.0", _TRUNCATION),
    "kv_dtype": Removed(
        "before 0.3.0",
        ("keys are stored in the model's dtype; for more room, raise max_memory_percent"),
    ),
    "cpu_offload_gib": Removed(
        "before 0.3.0", "set cpu_offload_space, or raise max_memory_percent"
    ),
    "balance_ranks": Removed("before 0.3.0", "no gain was measured; leave it out"),
}

# Values of settings that remain, by field and value.
VALUES = {
    ("scheduler_type", "longest_first"): Removed(
        "after 0.3.0", "it was faster on randomly drawn lengths only; set 'fifo'"
    ),
}
