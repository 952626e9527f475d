"""Give the forward of a batch the images of its rows, and their positions.

Used with the layouts of `batch`, by the thread that trains.

A: axes of positions, N: tokens of a packed batch, B: rows, S: longest row, T: tokens of a row.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.compat import multimodal
from cb_rollout.engine.images.inputs import joined_tensors
from cb_rollout.engine.images.prompt_images import PromptImages


class RowImages(NamedTuple):
    """The images of one row, and its positions."""

    images: PromptImages | None
    """None: it is a row of text beside others with images."""
    positions_AT: torch.Tensor
    """int64, of prompt and completion."""
    are_of_prompt: bool = True
    """False: some are of the completion, so that no other row shares the prompt's forward."""

    @property
    def digest(self) -> bytes | None:
        """Return a hash of the images; None: there are none."""
        return None if self.images is None else self.images.digest

    def arguments(self, names: frozenset[str], num_tokens: int) -> dict[str, torch.Tensor]:
        """Return what a forward of the row's first tokens is given of its images."""
        if self.images is None:
            return {}
        return self.images.taken(names, self.positions_AT.device).arguments(0, num_tokens)


def row_images(
    model: Any, sequences: Sequence[Sequence[int]], images: Sequence[PromptImages | None]
) -> list[RowImages]:
    """Return the images and the positions of rows, by the model's own function.

    Args:
        model: a transformers model.
        sequences: prompt and completion of each row.
        images: of each row's prompt; None: it has none.
    """
    names = multimodal.image_argument_names(model)
    device = next(model.parameters()).device
    found = []
    with multimodal.keeping_position_offsets(model):
        for sequence, own in zip(sequences, images, strict=True):
            positions = torch.arange(len(sequence), device=device)[None]
            if own is not None:
                ids_1T = torch.tensor([list(sequence)], device=device)
                given = own.taken(names, device).arguments(0, len(sequence))
                positions = multimodal.prompt_positions(model, ids_1T, given).flatten(0, -2)
            found.append(RowImages(own, positions))
    num_axes = max(len(row.positions_AT) for row in found)
    return [row._replace(positions_AT=row.positions_AT.expand(num_axes, -1)) for row in found]


def image_arguments(
    positions_ABS: torch.Tensor,
    given: Sequence[tuple[RowImages, int]],
    names: frozenset[str],
    dim: int,
) -> dict[str, torch.Tensor]:
    """Return a forward's arguments for the images of its rows, and its positions.

    Tensors of images are joined one after the other, those of tokens along `dim`.

    Args:
        positions_ABS: of all tokens, `[A, 1, N]` or `[A, B, S]`.
        given: rows with the number of tokens that each takes; those after its prompt are text.
        names: arguments of the model's forward.
        dim: 1 for one row of all tokens, 0 for rows of one length.
    """
    tensors = [(row, row.arguments(names, num_tokens)) for row, num_tokens in given]
    per_token = {name for row, _ in tensors if row.images for name in row.images.of_tokens}
    arguments = joined_tensors(
        [own for _, own in tensors], [number for _, number in given], frozenset(per_token), dim
    )
    # A model without axes takes (1, N) or (B, S).
    is_plain = len(positions_ABS) == 1
    return arguments | {"position_ids": positions_ABS[0] if is_plain else positions_ABS}
