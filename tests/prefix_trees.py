"""Random rows that are paths of prefix trees, as the turns of forked conversations are."""

import random


def random_paths(rng: random.Random, vocabulary: int, depth: int = 5) -> list[list[int]]:
    """Sequences of one tree, each of at least two tokens; some end where others go on."""
    paths: list[list[int]] = []

    def grow(path: list[int], levels: int) -> None:
        path = [*path, *(rng.randrange(3, vocabulary) for _ in range(rng.randint(1, 4)))]
        num_branches = rng.choice([0, 1, 2, 2, 3]) if levels else 0
        if len(path) > 1 and (not num_branches or rng.random() < 0.3):
            paths.append(path)
        for _ in range(num_branches):
            grow(path, levels - 1)

    while not paths:
        grow([], depth)
    return paths


def random_tree_rows(rng: random.Random, vocabulary: int, most: int = 12) -> list[tuple]:
    """Rows of two trees, as (prompt, completion); a prompt may end anywhere in the path.

    Some rows are equal, and some of equal paths have other prompts.
    """
    paths = [path for _ in range(2) for path in random_paths(rng, vocabulary)]
    paths += rng.choices(paths, k=2)
    rng.shuffle(paths)
    starts = [rng.randint(1, len(path)) for path in paths[:most]]
    return [(path[:n], path[n:]) for n, path in zip(starts, paths, strict=False)]
