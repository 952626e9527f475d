"""Count sequences whose log-probabilities with numerics="bitwise" are the trainer's in every bit.

Plays the state machine of tests/numerics on one type after the other, each round with another seed,
until enough sequences were compared. Ends at the first bit that differs.

python scripts/chaos/bitwise.py --sequences 10000    # about half an hour on one core
"""

import argparse
import platform
import sys
import warnings
from collections import Counter
from datetime import date
from itertools import count
from pathlib import Path

import torch
import transformers

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "families"), str(TESTS / "numerics")]

from bitwise_rollouts import ENGINES, TYPES, compare_rollouts  # noqa: E402 - a folder of the tests

SEQUENCES_OF_AN_ENGINE = 20


def main() -> None:
    """Compare, and print the counts by type."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=10_000, help="to compare at least")
    num_wanted = parser.parse_args().sequences
    # Types warn of slower paths.
    warnings.simplefilter("ignore")
    sequences: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    num_preemptions = 0
    for seed in count():
        for model_type in TYPES:
            rollouts = compare_rollouts(model_type, SEQUENCES_OF_AN_ENGINE, seed)
            sequences[model_type] += rollouts.num_compared
            tokens[model_type] += rollouts.num_tokens
            num_preemptions += rollouts.num_preemptions
        print(f"seed {seed}: {sequences.total():,} sequences", flush=True)
        if sequences.total() >= num_wanted:
            break
    print("\n| type | sequences | tokens |\n| --- | --- | --- |")
    for model_type in TYPES:
        print(f"| {model_type} | {sequences[model_type]:,} | {tokens[model_type]:,} |")
    print(f"| all {len(TYPES)} | {sequences.total():,} | {tokens.total():,} |")
    print(
        f"\nNone differs in any bit; {num_preemptions:,} preemptions "
        f"on {len(ENGINES)} engines. {platform.machine()}, {date.today()}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}."
    )


if __name__ == "__main__":
    main()
