"""Prepare the inputs of a prefill of prompts with images: tensors and positions of its rows.

A: axes of positions, N: new tokens of all rows, T: tokens of a prompt.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.images.prompt_images import PromptImages, joined
from cb_rollout.engine.memory import device as devices


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


class ImageInputs:
    """Give a model's forward the tensors of images, and the positions of prompts with images."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._names = multimodal.image_argument_names(model)
        self.casts_pixels = False
        """True if pixels are cast to the model's dtype, because its forward takes no other."""

    def are_read(self, images: PromptImages) -> bool:
        """Return whether the forward takes the pixels of these images."""
        tensors = images.images[0].tensors
        return any(t.is_floating_point() and name in self._names for name, t in tensors.items())

    def on_device(self, images: PromptImages, start: int = 0) -> PromptImages:
        """Return what a forward takes that begins at `start`, on its device."""
        dtype = self._model.dtype if self.casts_pixels else None
        return images.taken(self._names, self._device, dtype, start)

    def arguments(self, images: PromptImages, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the tensors for the tokens from `start` to `stop`, on the forward's device."""
        return self.on_device(images, start).arguments(start, stop)

    def new_positions(self, row: PrefillRow) -> torch.Tensor:
        """Return the position ids of a row's new tokens, `[1, tokens]` or `[A, 1, tokens]`."""
        if row.new_images is not None:
            return self._positions(row.token_ids, row.new_images)[..., row.start : row.stop]
        offset = 0 if row.images is None else row.images.position_offset
        assert offset is not None, "no forward has seen the images"
        return torch.arange(row.start + offset, row.stop + offset, device=self._device)[None]

    def find_positions(self, prompts: Sequence[tuple[Sequence[int], PromptImages]]) -> None:
        """Set the `position_offset` of each prompt's images, without a forward."""
        new = [prompt for prompt in prompts if prompt[1].position_offset is None]
        with multimodal.keeping_position_offsets(self._model) if new else nullcontext():
            for prompt_ids, images in new:
                self._computed_positions(prompt_ids, images)

    def _positions(self, token_ids: Sequence[int], images: PromptImages) -> torch.Tensor:
        """Return each token's position ids, `[..., T]`, by the model; set the images' offset."""
        num_tokens = len(token_ids)
        if images.positions is not None and num_tokens <= images.num_prompt_tokens:
            return images.positions[..., :num_tokens].to(self._device)
        with multimodal.keeping_position_offsets(self._model):
            return self._computed_positions(token_ids, images)

    def _computed_positions(self, token_ids: Sequence[int], images: PromptImages) -> torch.Tensor:
        num_tokens = len(token_ids)
        # One more token, which is text: where the prompt ends in an image, the next position is not
        # the last one plus one.
        text_id = hf_compat.text_token_ids(self._model)[0]
        input_ids_1T = devices.to_device([[*token_ids, text_id]], self._device)
        arguments = self.arguments(images, 0, num_tokens + 1)
        positions = multimodal.prompt_positions(self._model, input_ids_1T, arguments)
        images.position_offset = int(positions.flatten()[-1]) - num_tokens
        if num_tokens == images.num_prompt_tokens:
            images.positions = positions[..., :num_tokens].cpu()
        return positions[..., :num_tokens]


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
    return joined(positions, -1)


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
    arguments: dict[str, torch.Tensor] = {}
    for name in {name: None for row in rows for name in row}:
        present = [row[name] for row in rows if name in row]
        if name in per_token:
            first = present[0]
            present = [
                row.get(name, first.new_zeros(1, number, *first.shape[2:]))
                for row, number in zip(rows, num_tokens, strict=True)
            ]
        arguments[name] = joined(present, dim if name in per_token else 0)
    return arguments
