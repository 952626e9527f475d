"""Compare a model on pages with its plain forward, on a prompt with images.

Runs in the thread of the first caller with such a prompt, while no step runs. V: vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from cb_rollout.engine.images.prompt_images import PromptImages
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.check import attempt, difference, pages_for, text_rows
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import Reference, is_measurable, references
from cb_rollout.errors import ConfigurationError, error_text


def check_images(
    runner: ModelRunner, layout: CacheLayout, prompt_ids: list[int], images: PromptImages
) -> None:
    """Raise `ConfigurationError` if a prompt with images on pages is unlike a plain forward's.

    Where the model, which has passed `check_model`, differs only in a forward that begins between
    images, the runner begins none for prompts of this kind.
    """
    name = type(runner.model).__name__
    if not runner.image_inputs.are_read(images):
        given = ", ".join([*images.images[0].tensors, *images.of_tokens])
        raise ConfigurationError(
            f"{name}.forward takes none of the images' tensors ({given}); load a model that reads "
            "images, by AutoModelForImageTextToText, with its own processor."
        )
    if any(layer.num_index_positions for layer in layout.layers):
        raise ConfigurationError(
            f"{name} chooses keys by an index that keeps the positions of images, which pages do "
            "not hold; roll prompts with images out with model.generate."
        )
    text, *_ = text_rows(runner)
    # The prompt's own text, if it ends in any, stands for nothing but text.
    following = prompt_ids[images.num_tokens :][-2:] or text[:2]
    row = [*prompt_ids, following[0], following[-1]]
    with eval_mode(runner.model), devices.current(runner.device):
        plain = failure = None
        for runner.image_inputs.casts_pixels in (False, True):
            plain, failure = attempt(partial(runner.plain_logits, row, images=images, num_last=3))
            if plain is not None:
                break
        if plain is None:
            raise ConfigurationError(
                f"{name} does not take the prompt with its images ({error_text(failure)}); is the "
                "processor the model's own?"
            ) from failure
        if plain.isnan().any():
            # Diverged weights show nothing; the sampler refuses their tokens.
            runner.cuts_images[images.kind] = False
            return
        # Surest in float32: a wrong mask of images may be hundredths of a nat off.
        surest, *own = references(
            lambda: runner.plain_logits(row, images=images, num_last=3).log_softmax(-1),
            runner.rounding_dtype,
            runner.computing_in,
            is_coarse=runner.computes_coarsely,
            is_measured=is_measurable(runner.model, len(row)),
            can_raise_precision=not runner.is_split,
        )
        _compare(_PagedPrompt(runner, row, text, images), layout, surest, own)


def _compare(
    prompt: "_PagedPrompt", layout: CacheLayout, surest: Reference, own: Sequence[Reference]
) -> None:
    """Refuse a model that differs; find whether a forward may begin between images."""
    runner, images, num_prompt = prompt.runner, prompt.images, len(prompt.row) - 2

    def found(num_first: int, reference: Reference) -> tuple[str, Exception | None]:
        reference = replace(reference, noise=reference.noise.max().expand(3))
        return difference(runner, layout, [reference], partial(prompt.logprobs, num_first))

    def require(num_first: int, reference: Reference) -> None:
        reason, failure = found(num_first, reference)
        if reason:
            raise ConfigurationError(
                f"{type(runner.model).__name__} cannot run prompts with images on a paged cache: "
                f"{reason}. Roll them out with model.generate."
            ) from failure

    backend, can_resume = runner.attention_backend, not layout.is_recurrent
    if surest.is_higher:
        runner.attention_backend = None
    try:
        require(num_prompt, surest)
        if images.num_tokens < num_prompt and can_resume:
            require(images.num_tokens, surest)
        first = images.images[-1].tokens.start
        can_cut = first > 0 and images.is_divided and can_resume
        runner.cuts_images[images.kind] = can_cut and not found(first, surest)[0]
    finally:
        runner.attention_backend = backend
    for reference in own:
        require(num_prompt, reference)


class _PagedPrompt(NamedTuple):
    """A prompt with images and its two next tokens, computed on pages in several ways."""

    runner: ModelRunner
    row: list[int]
    """The prompt and two tokens."""
    text: list[int]
    """Another prompt, without images, and two tokens."""
    images: PromptImages

    def _prefilled(
        self, start: int, stop: int, images: PromptImages, pages: tuple[PagedCache, BlockTable]
    ) -> torch.Tensor:
        runner, num_prompt = self.runner, images.num_prompt_tokens
        runner.image_inputs.find_positions([(self.row[:num_prompt], images)])
        sides = [runner.rope.side(max(stop, num_prompt))]
        rows = [self.row[start:stop]], [stop], [0]
        return runner.logits(ForwardBatch(*rows, *pages, rope_sides=sides, images=images))

    def logprobs(self, num_first: int, layout: CacheLayout) -> torch.Tensor:
        """Return log-probabilities after the prompt and its two next tokens, `[3, V]`.

        A first prefill takes `num_first` tokens, a second the rest: text, or the last image and
        text. The last token is decoded beside a sequence without images.
        """
        runner, row, text, images = self.runner, self.row, self.text, self.images
        pages = pages_for(runner, layout, 2, max(len(row), len(text)))
        num_prompt = len(row) - 2
        if num_first >= images.num_tokens:
            logits = self._prefilled(0, num_first, images, pages)
        elif len(images.images) == 1:
            logits = runner.logits(ForwardBatch([row[:num_first]], [num_first], [0], *pages))
        else:
            # As another prompt would have left it, which has no more images.
            before = images.before(len(images.images) - 1)
            logits = self._prefilled(0, num_first, before, pages)
        runner.image_inputs.find_positions([(row[:-2], images)])
        offset = images.position_offset
        assert offset is not None
        if num_first < images.num_tokens:
            logits = self._prefilled(num_first, num_prompt, images, pages)
        elif num_first < num_prompt:
            rest = row[num_first:num_prompt]
            logits = runner.logits(ForwardBatch([rest], [num_prompt], [0], *pages, [offset]))
        lengths = [len(row), len(text)]
        runner.logits(ForwardBatch([text[:-2]], [len(text) - 2], [1], *pages))
        alone = runner.logits(ForwardBatch([row[-2:-1]], [len(row) - 1], [0], *pages, [offset]))
        runner.logits(ForwardBatch([text[-2:-1]], [len(text) - 1], [1], *pages))
        last = [row[-1:], text[-1:]]
        beside = runner.logits(ForwardBatch(last, lengths, [0, 1], *pages, [offset, 0]))
        return torch.cat([logits, alone, beside[:1]]).log_softmax(-1)
