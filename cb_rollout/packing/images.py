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


def packed_arguments(
    prompts: Sequence[tuple[RowImages, int, Sequence[tuple[RowImages, int]]]],
    names: frozenset[str],
) -> dict[str, torch.Tensor]:
    """Return the arguments of one row of all tokens.

    Args:
        prompts: for each prompt a row of it, its tokens, and each completion's row and tokens.
        names: arguments of the model's forward.
    """
    positions: list[torch.Tensor] = []
    given: list[tuple[RowImages, int]] = []
    for row, num_prompt, completions in prompts:
        positions.append(row.positions_AT[:, :num_prompt])
        num_tokens = num_prompt
        for member, num_new in completions:
            positions.append(member.positions_AT[:, num_prompt : num_prompt + num_new])
            num_tokens += num_new
        given.append((row, num_tokens))
    return _arguments(torch.cat(positions, 1)[:, None], given, names, dim=1)


def padded_arguments(
    rows: Sequence[tuple[RowImages, int]], width: int, names: frozenset[str]
) -> dict[str, torch.Tensor]:
    """Return the arguments of rows and their tokens, padded on the right to `width`."""
    positions = [
        torch.nn.functional.pad(row.positions_AT[:, :num_tokens], (0, width - num_tokens))
        for row, num_tokens in rows
    ]
    given = [(row, width) for row, _ in rows]
    return _arguments(torch.stack(positions, 1), given, names, dim=0)


def _arguments(
    positions_ABS: torch.Tensor,
    given: Sequence[tuple[RowImages, int]],
    names: frozenset[str],
    dim: int,
) -> dict[str, torch.Tensor]:
    """Join the tensors of rows: those of images one after the other, those of tokens along `dim`.

    `given`: rows, each with the tokens that it takes; those after its prompt are text.
    """
    tensors = [(row, row.arguments(names, num_tokens)) for row, num_tokens in given]
    per_token = {name for row, _ in tensors if row.images for name in row.images.of_tokens}
    arguments = joined_tensors(
        [own for _, own in tensors], [number for _, number in given], frozenset(per_token), dim
    )
    # A model without axes takes (1, N) or (B, S).
    is_plain = len(positions_ABS) == 1
    return arguments | {"position_ids": positions_ABS[0] if is_plain else positions_ABS}
