"""Print what racing completions biases, where all sequences run at once.

For docs/strategies.md: a model of `OverSampling` on the lengths of long_tailed_lengths.json.

python scripts/measure/tail.py
"""

import argparse
import json
from pathlib import Path
from statistics import mean

RECORDED = Path(__file__).with_name("long_tailed_lengths.json")
NUM_KEPT = 4


def kept_members(groups: list[list[int]], num_extra: int) -> tuple[list[int], int]:
    """Return the lengths that are kept with extra members, and the number of tokens lost.

    A group's unfinished members are cancelled when enough have ended.
    """
    kept: list[int] = []
    num_lost = 0
    for group in groups:
        submitted = sorted(group[: NUM_KEPT + num_extra])
        kept += submitted[:NUM_KEPT]
        num_lost += (len(submitted) - NUM_KEPT) * submitted[NUM_KEPT - 1]
    return kept, num_lost


def kept_groups(groups: list[list[int]], num_extra: int) -> tuple[list[int], int]:
    """Return the same with extra groups; a group ends with its longest member."""
    whole = sorted((group[:NUM_KEPT] for group in groups), key=max)
    kept, lost = whole[: len(whole) - num_extra], whole[len(whole) - num_extra :]
    end = max(kept[-1])
    return [n for group in kept for n in group], sum(min(n, end) for group in lost for n in group)


def main() -> None:
    """Measure and print."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    rollouts: list[list[list[int]]] = []
    for rollout in json.loads(RECORDED.read_text())["rollouts"]:
        pairs = zip(rollout["earlier"], rollout["lengths"], strict=True)
        rollouts.append([lengths + earlier for earlier, lengths in pairs])
    everything = mean(n for groups in rollouts for group in groups for n in group[:NUM_KEPT])
    print(f"{'':<34}{'mean length':>12}{'bias':>7}{'steps':>7}{'lost tokens':>13}")
    for label, keep, extras in (
        ("extra members of groups of 4", kept_members, (0, 1, 2, 4)),
        ("extra groups of 32 submitted", kept_groups, (0, 2, 4, 8)),
    ):
        for num_extra in extras:
            kept, lost = zip(*(keep(groups, num_extra) for groups in rollouts), strict=True)
            length = mean(n for lengths in kept for n in lengths)
            steps = sum(map(max, kept))
            share = sum(lost) / (sum(lost) + sum(map(sum, kept)))
            print(
                f"{label:<30}{num_extra:>4}{length:>12.1f}{length / everything - 1:>7.0%}"
                f"{steps:>7,}{share:>13.0%}"
            )


if __name__ == "__main__":
    main()
