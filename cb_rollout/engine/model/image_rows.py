"""Lay out a prefill of prompts with images: the tensors of all rows, joined, and their positions.

A: axes of positions, N: new tokens of all rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.engine.model.prompt_images import PromptImages


class PrefillRow(NamedTuple):
    """New tokens of one sequence in a prefill of which some rows compute images."""

    token_ids: Sequence[int]
    """All tokens of the sequence, those after its prompt included."""
    start: int
    """Number of the tokens that are in the cache already; `images.num_resumable`."""
    stop: int
    """Index after the last token to run; at least `images.num_tokens` where images are new."""
    table_row: int
    images: PromptImages | None = None
    """Images of the prompt, which may be in the cache already; None: it has none."""
    routes: Any = None
    """Experts that the first new tokens took before, as in `ModelRunner.logits`; None: unknown."""

    @property
    def new_tokens(self) -> Sequence[int]:
        """Return the tokens to run."""
        return self.token_ids[self.start : self.stop]

    @property
    def num_new(self) -> int:
        """Return the number of tokens to run."""
        return self.stop - self.start

    @property
    def new_images(self) -> PromptImages | None:
        """Return the images, if the forward computes any; None: it computes text alone."""
        is_new = self.images is not None and self.start < self.images.num_tokens
        return self.images if is_new else None


def joined_positions(positions: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the position ids of rows as of one, `[1, N]` or `[A, 1, N]`.

    Args:
        positions: `[1, tokens]` or `[A, 1, tokens]` of each row; one of text has the same position
            in all axes.
    """
    most = max(positions, key=torch.Tensor.dim)
    if most.dim() > 2:
        axes = len(most)
        positions = [row.expand(axes, 1, -1) if row.dim() == 2 else row for row in positions]
    return torch.cat(list(positions), -1)


def joined_tensors(
    rows: Sequence[Mapping[str, torch.Tensor]],
    num_tokens: Sequence[int],
    per_token: frozenset[str],
    dim: int,
) -> dict[str, torch.Tensor]:
    """Return the arguments of one forward from those of its rows.

    Tensors of images stand one after the other; of those with a number for each token a row without
    images has zeros.

    Args:
        rows: the tensors of each row by name; empty for a row of text.
        num_tokens: numbers that a tensor of `per_token` has for each row.
        per_token: names of the tensors that hold a number for each token, `[1, tokens, ...]`.
        dim: along which those are joined: 1 to one row of all tokens, 0 to rows of one length.
    """
    joined: dict[str, torch.Tensor] = {}
    for name in {name: None for row in rows for name in row}:
        present = [row[name] for row in rows if name in row]
        if name in per_token:
            first = present[0]
            present = [
                row.get(name, first.new_zeros(1, number, *first.shape[2:]))
                for row, number in zip(rows, num_tokens, strict=True)
            ]
        joined[name] = torch.cat(present, dim if name in per_token else 0)
    return joined
