"""What is asked of every contender: prompts, and how many tokens each completion is to have."""

import random
from dataclasses import dataclass

from cb_rollout.tools.bench.sizes import SEED, Sizes


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens each completion is forced to have."""

    prompts: list[list[int]]
    """One per completion; equal neighbours form a group."""
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        """Useful tokens: those that were asked for."""
        return sum(self.lengths)

    def first(self, count: int) -> "Workload":
        """So many of its sequences."""
        return Workload(self.prompts[:count], self.lengths[:count])


def random_prompts(
    draws: random.Random, count: int, tokens: tuple[int, int], vocab_size: int
) -> list[list[int]]:
    """Prompts of random ids, of the shortest to the longest length."""
    return [
        [draws.randrange(2, vocab_size) for _ in range(draws.randint(*tokens))]
        for _ in range(count)
    ]


def long_tailed_lengths(
    draws: random.Random, count: int, log_mean: float, longest: int
) -> list[int]:
    """How long completions are in training: most short, a few very long."""
    return [min(longest, max(1, int(draws.lognormvariate(log_mean, 0.9)))) for _ in range(count)]


def grouped(prompts: list[list[int]], num_completions: int) -> list[list[int]]:
    """Each prompt repeated for its group."""
    return [prompt for prompt in prompts for _ in range(num_completions)]


def long_tailed(sizes: Sizes) -> Workload:
    """Groups of completions with a long tail: a rollout as training has it."""
    draws = random.Random(SEED)
    prompts = random_prompts(
        draws, sizes.num_prompts, sizes.prompt_tokens, sizes.shape["vocab_size"]
    )
    return Workload(
        grouped(prompts, sizes.num_completions),
        long_tailed_lengths(draws, sizes.num_sequences, sizes.log_mean_tokens, sizes.longest),
    )


def equal_lengths(sizes: Sizes, count: int | None = None, tokens: int | None = None) -> Workload:
    """Prompts of their own, and completions of one length: the best case of a fixed batch.

    Args:
        sizes: of prompts, and what is not said here.
        count: how many; None: one rollout's.
        tokens: of each completion; None: `sizes.equal_tokens`.
    """
    count = count or sizes.num_sequences
    draws = random.Random(SEED)
    prompts = random_prompts(draws, count, sizes.prompt_tokens, sizes.shape["vocab_size"])
    return Workload(prompts, [tokens or sizes.equal_tokens] * count)
