"""Model the attention of a decode step whose rows differ, by the programs that read their keys.

Arithmetic alone. A kernel takes as long as all of its keys at the card's rate, or as its longest
program at one processor's share of it, if that is longer. Programs that find nothing to do are
counted, and have no time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.roofline.cards import Card
from cb_rollout.engine.attention.shared_prefix import (
    SHORT_STRETCH,
    STRETCH_INTERVAL,
    is_cut,
    max_stretches,
)

# Bytes of a number in bfloat16.
BF16 = 2

# Keys of a stretch where each row is cut into as many as the longest one.
LONG_STRETCH = 1024


class Keys(NamedTuple):
    """The keys of a step."""

    own: Sequence[int]
    """Of each row, those of a shared prompt left out."""
    shared: Sequence[int] = ()
    """Of each tile of rows that share a prompt."""


# A group is one tile: 16 rows of four query heads for each key head.
STEPS = {
    "16 rows, a prompt of 8,192 shared": Keys([300] * 16, [8192]),
    "255 rows of 300 tokens, one of 8,192": Keys([300] * 255 + [8192]),
    "256 rows of 300 tokens": Keys([300] * 256),
}


class Programs(NamedTuple):
    """The programs of one key head."""

    keys: Sequence[int]
    """Of each program that has any."""
    num_launched: int
    """Those without keys included."""

    def milliseconds(self, shape: dict[str, Any], card: Card) -> float:
        """Return the modelled time of all layers."""
        num_heads = shape["num_key_value_heads"]
        per_key = 2 * BF16 * shape["head_dim"]
        whole = sum(self.keys) * num_heads * per_key / card.bytes_per_second
        longest = max(self.keys) * per_key * card.num_processors / card.bytes_per_second
        return 1e3 * shape["num_hidden_layers"] * max(whole, longest)


def cut_by_list(step: Keys, num_stretches: int) -> Programs:
    """Return the programs of the engine's own kernels: those of `launch.cut`."""
    if not step.shared and not is_cut(step.own, num_stretches):
        return Programs(step.own, len(step.own))
    keys, num_launched = [], 0
    for units in filter(None, (step.own, step.shared)):
        stretch = max(SHORT_STRETCH, -(-sum(units) // num_stretches))
        stretch = -(-stretch // STRETCH_INTERVAL) * STRETCH_INTERVAL
        keys += [min(stretch, unit - at) for unit in units for at in range(0, unit, stretch)]
        num_launched += len(units) + num_stretches
    return Programs(keys, num_launched)


def cut_as_the_longest(step: Keys) -> Programs:
    """Return the programs where rows are cut as the longest one, and no shared prompt is."""
    num_splits = 1 << (-(-max(step.own) // LONG_STRETCH) - 1).bit_length()
    keys = list(step.shared)
    for own in step.own:
        stretch = max(SHORT_STRETCH, -(-own // num_splits))
        keys += [min(stretch, own - at) for at in range(0, own, stretch)]
    return Programs(keys, num_splits * len(step.own) + len(step.shared))


def stretches(shape: dict[str, Any], card: Card) -> dict[str, dict[str, float]]:
    """Return programs and modelled times of the attention of each of `STEPS`."""
    num_heads = shape["num_key_value_heads"]
    found = {}
    for name, step in STEPS.items():
        ways = {
            "cut as the longest row": cut_as_the_longest(step),
            "cut by a list": cut_by_list(step, max_stretches(num_heads, card.num_processors)),
        }
        for way, programs in ways.items():
            found[f"{name}, {way}"] = {
                "programs": programs.num_launched * num_heads,
                "programs_with_keys": len(programs.keys) * num_heads,
                "longest_keys": max(programs.keys),
                "milliseconds": programs.milliseconds(shape, card),
            }
    return found
