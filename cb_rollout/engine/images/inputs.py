"""Prepare the inputs of a prefill of a prompt with images: its tensors and positions.

A: axes of positions, T: tokens of a prompt.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel

from cb_rollout.compat import multimodal
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.memory import device as devices


class ImageInputs:
    """Give a model's forward the tensors of images, and the positions of prompts with images."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._names = multimodal.image_argument_names(model)
        self.casts_pixels = False
        """True if pixels are cast to the model's dtype, because its forward takes no other."""

    def are_read(self, images: PromptImages) -> bool:
        tensors = images.images[0].tensors
        return any(t.is_floating_point() and name in self._names for name, t in tensors.items())

    def on_device(self, images: PromptImages, start: int = 0) -> PromptImages:
        dtype = self._model.dtype if self.casts_pixels else None
        return images.taken(self._names, self._device, dtype, start)

    def arguments(self, images: PromptImages, start: int, stop: int) -> dict[str, torch.Tensor]:
        return self.on_device(images, start).arguments(start, stop)

    def positions(self, images: PromptImages, start: int, stop: int) -> torch.Tensor:
        """Return position ids, `[1, tokens]` or `[A, 1, tokens]`; after the prompt, of text."""
        assert images.positions is not None, "no position was found"
        assert images.position_offset is not None
        of_prompt = images.positions[..., start:stop].to(self._device)
        first, offset = max(start, images.num_prompt_tokens), images.position_offset
        later = torch.arange(first + offset, max(first, stop) + offset, device=self._device)
        return torch.cat([of_prompt, later.expand(*of_prompt.shape[:-1], -1)], -1)

    def find_positions(self, prompts: Sequence[tuple[Sequence[int], PromptImages]]) -> None:
        new = [prompt for prompt in prompts if prompt[1].positions is None]
        # One more token, which is text: where the prompt ends in an image, the next position is not
        # the last one plus one.
        text_id = hf_compat.text_token_ids(self._model)[0] if new else 0
        with multimodal.keeping_position_offsets(self._model) if new else nullcontext():
            for prompt_ids, images in new:
                num_tokens = len(prompt_ids)
                input_ids_1T = devices.to_device([[*prompt_ids, text_id]], self._device)
                arguments = self.arguments(images, 0, num_tokens + 1)
                positions = multimodal.prompt_positions(self._model, input_ids_1T, arguments)
                images.position_offset = int(positions.flatten()[-1]) - num_tokens
                images.positions = positions[..., :num_tokens].cpu()
