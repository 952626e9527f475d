"""Compare a model's paged forward with its plain forward, on a prompt with images.

Runs in the thread of the first caller with such a prompt, while no step runs. V: vocabulary.
"""

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
from cb_rollout.engine.model.execution import ImageCheck
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import Reference, is_measurable, references
from cb_rollout.engine.request import Request
from cb_rollout.errors import ConfigurationError, error_text

# Logits that are compared: after the prompt, and after each of two more tokens.
NUM_COMPARED = 3


class ImageChecks:
    """The kinds of images on which an engine has compared its model.

    Owns whether a forward may begin between two images of a prompt of each kind.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.cuts: dict[tuple[bool, bool], bool] = {}
        """True where prompts may be cut between images, by checked `PromptImages.kind`."""

    def is_due(self, images: PromptImages) -> bool:
        """Return whether prompts with images of this kind still need a comparison."""
        return images.kind not in self.cuts

    def may_cut(self, images: PromptImages) -> bool:
        """Return whether a forward may begin between these images."""
        return self.cuts.get(images.kind, False)

    def check(self, request: Request, layout: CacheLayout) -> None:
        """Compare the model on a request's images; the result applies to all images of their kind.

        Args:
            request: has images.
            layout: of the model's cache.

        Raises:
            ConfigurationError: the model takes no images, or computes them differently on pages.
        """
        images = request.images
        assert images is not None
        checked = check_images(self._runner, layout, request.prompt_ids, images)
        self._runner.use_images(checked)
        self.cuts[images.kind] = checked.may_cut

    def forget(self) -> None:
        """Compare all kinds again, because the model's layout on pages changed."""
        self.cuts.clear()


def check_images(
    runner: ModelRunner, layout: CacheLayout, prompt_ids: list[int], images: PromptImages
) -> ImageCheck:
    """Find how a model computes prompts with images of this kind on pages.

    If it differs from its plain forward only when a forward begins between images, such prompts may
    not be cut there.

    Args:
        runner: runs the model, which has passed `check_model`; left as it was.
        layout: of the model's cache.
        prompt_ids: a prompt with images.
        images: those of the prompt.

    Raises:
        ConfigurationError: the model takes no images, or computes them differently on pages.
    """
    _require_readable(runner, layout, images)
    text = text_rows(runner)[0]
    # Two tokens that are certainly not placeholders: from the text after the prompt's last image,
    # or from a prompt without images.
    following = prompt_ids[images.num_tokens :][-2:] or text[:2]
    row = [*prompt_ids, following[0], following[-1]]
    prompt = _PagedPrompt(runner, row, text, images)
    with eval_mode(runner.model), devices.current(runner.device):
        plain, casts_pixels = _plain_logits(prompt)
        if plain.isnan().any():
            # Diverged weights show nothing; the sampler refuses their tokens.
            return ImageCheck(casts_pixels=casts_pixels, may_cut=False)
        with runner.image_inputs.casting_pixels(casts_pixels):
            may_cut = _compare(prompt, layout)
    return ImageCheck(casts_pixels=casts_pixels, may_cut=may_cut)


def _require_readable(runner: ModelRunner, layout: CacheLayout, images: PromptImages) -> None:
    """Refuse a model that takes no pixels, or stores image positions that do not fit into pages."""
    name = type(runner.model).__name__
    if not runner.image_inputs.are_read(images):
        given = ", ".join([*images.images[0].tensors, *images.of_tokens])
        raise ConfigurationError(
            f"{name}.forward accepts none of the images' tensors ({given}); load a model that "
            "reads images with AutoModelForImageTextToText, and its own processor."
        )
    if any(layer.num_index_positions for layer in layout.layers):
        raise ConfigurationError(
            f"{name} selects keys by image positions, which the paged cache does not store; use "
            "model.generate for prompts with images."
        )


def _plain_logits(prompt: "_PagedPrompt") -> tuple[torch.Tensor, bool]:
    """Return the prompt's logits by a plain forward, `[3, V]`, and whether pixels must be cast."""
    runner = prompt.runner
    failure = None
    for casts_pixels in (False, True):
        with runner.image_inputs.casting_pixels(casts_pixels):
            plain, failure = attempt(prompt.plain_logits)
        if plain is not None:
            return plain, casts_pixels
    raise ConfigurationError(
        f"{type(runner.model).__name__} rejects the prompt with its images "
        f"({error_text(failure)}); is the processor the model's own?"
    ) from failure


def _compare(prompt: "_PagedPrompt", layout: CacheLayout) -> bool:
    """Refuse a model that differs on pages; return whether a forward may begin between images."""
    runner = prompt.runner
    images = prompt.images
    num_prompt = len(prompt.row) - 2
    can_resume = not layout.is_recurrent
    in_each_precision = references(
        lambda: prompt.plain_logits().log_softmax(-1),
        runner.rounding_dtype,
        runner.computing_in,
        is_coarse=runner.computes_coarsely,
        is_measured=is_measurable(runner.model, len(prompt.row)),
        can_raise_precision=not runner.is_split,
    )
    # The surest comparison is in float32: a wrong mask of images may be hundredths of a nat off.
    surest = in_each_precision[0]
    execution = runner.execution
    if surest.is_higher:
        execution = replace(execution, attention_backend=None)
    with runner.using(execution):
        _require_agreement(prompt, layout, surest, num_prompt)
        if images.num_tokens < num_prompt and can_resume:
            _require_agreement(prompt, layout, surest, images.num_tokens)
        may_cut = False
        start_of_last = images.images[-1].tokens.start
        if start_of_last > 0 and images.is_divided and can_resume:
            differs, _ = _difference(prompt, layout, surest, start_of_last)
            may_cut = not differs
    for reference in in_each_precision[1:]:
        _require_agreement(prompt, layout, reference, num_prompt)
    return may_cut


def _require_agreement(
    prompt: "_PagedPrompt", layout: CacheLayout, reference: Reference, num_first: int
) -> None:
    """Refuse a model that differs if the first forward takes `num_first` tokens."""
    differs, failure = _difference(prompt, layout, reference, num_first)
    if differs:
        raise ConfigurationError(
            f"{type(prompt.runner.model).__name__} cannot run prompts with images on a paged "
            f"cache: {differs}. Use model.generate for them."
        ) from failure


def _difference(
    prompt: "_PagedPrompt", layout: CacheLayout, reference: Reference, num_first: int
) -> tuple[str, Exception | None]:
    """Return how pages differ from a reference ("": only by rounding), and an error."""
    largest_noise = reference.noise.max().expand(NUM_COMPARED)
    reference = replace(reference, noise=largest_noise)
    paged = partial(prompt.logprobs, num_first)
    return difference(prompt.runner, layout, [reference], paged)


class _PagedPrompt(NamedTuple):
    """A prompt with images and its two next tokens, computed on pages in several ways."""

    runner: ModelRunner
    row: list[int]
    """The prompt and two tokens."""
    text: list[int]
    """Another prompt, without images, and two tokens."""
    images: PromptImages

    def plain_logits(self) -> torch.Tensor:
        """Return logits after the prompt and its two next tokens, `[3, V]`, without pages."""
        return self.runner.plain_logits(self.row, images=self.images, num_last=NUM_COMPARED)

    def _prefilled(
        self, start: int, stop: int, images: PromptImages, pages: tuple[PagedCache, BlockTable]
    ) -> torch.Tensor:
        """Return logits after a prefill of the prompt's tokens from `start` to `stop`, `[1, V]`.

        Args:
            start: the first token.
            stop: the end of the tokens.
            images: those of the prompt, or those before some token of it.
            pages: hold the tokens before `start`.
        """
        runner = self.runner
        num_prompt = images.num_prompt_tokens
        runner.image_inputs.find_positions([(self.row[:num_prompt], images)])
        cache, table = pages
        batch = ForwardBatch(
            new_tokens=[self.row[start:stop]],
            lengths=[stop],
            table_rows=[0],
            cache=cache,
            table=table,
            rope_sides=[runner.rope.side(max(stop, num_prompt))],
            images=images,
        )
        return runner.logits(batch)

    def _text_logits(
        self,
        token_ids: list[int],
        start: int,
        table_row: int,
        pages: tuple[PagedCache, BlockTable],
        offset: int = 0,
    ) -> torch.Tensor:
        """Return logits after text tokens of a row, `[1, V]`.

        Args:
            token_ids: the row up to the end of these tokens.
            start: the first of these tokens.
            table_row: the row's index into the block table.
            pages: hold the tokens before `start`.
            offset: position of the tokens, minus their index.
        """
        cache, table = pages
        batch = ForwardBatch(
            new_tokens=[token_ids[start:]],
            lengths=[len(token_ids)],
            table_rows=[table_row],
            cache=cache,
            table=table,
            position_offsets=[offset] if offset else (),
        )
        return self.runner.logits(batch)

    def _prompt_logits(self, num_first: int, pages: tuple[PagedCache, BlockTable]) -> torch.Tensor:
        """Return logits after the prompt, `[1, V]`; a first prefill takes `num_first` tokens."""
        images = self.images
        prompt = self.row[:-2]
        if num_first >= images.num_tokens:
            logits = self._prefilled(0, num_first, images, pages)
        elif len(images.images) == 1:
            logits = self._text_logits(prompt[:num_first], 0, 0, pages)
        else:
            # As in a cached prefix: another prompt computed these tokens, without knowing the last
            # image.
            before = images.before(len(images.images) - 1)
            logits = self._prefilled(0, num_first, before, pages)
        self.runner.image_inputs.find_positions([(prompt, images)])
        if num_first < images.num_tokens:
            return self._prefilled(num_first, len(prompt), images, pages)
        if num_first < len(prompt):
            return self._text_logits(prompt, num_first, 0, pages, self._position_offset)
        return logits

    @property
    def _position_offset(self) -> int:
        """Return the position of a token after the prompt's images, minus its index."""
        offset = self.images.position_offset
        assert offset is not None, "positions are found by a prefill"
        return offset

    def logprobs(self, num_first: int, layout: CacheLayout) -> torch.Tensor:
        """Return log-probabilities after the prompt and its two next tokens, `[3, V]`.

        A first prefill takes `num_first` tokens, a second the rest: text, or the last image and
        text. The last token is decoded in a batch with a sequence without images.
        """
        row = self.row
        text = self.text
        longest = max(len(row), len(text))
        pages = pages_for(self.runner, layout, num_rows=2, longest=longest)
        after_prompt = self._prompt_logits(num_first, pages)
        offset = self._position_offset
        self._text_logits(text[:-2], 0, 1, pages)
        alone = self._text_logits(row[:-1], len(row) - 2, 0, pages, offset)
        self._text_logits(text[:-1], len(text) - 2, 1, pages)
        cache, table = pages
        both = ForwardBatch(
            new_tokens=[row[-1:], text[-1:]],
            lengths=[len(row), len(text)],
            table_rows=[0, 1],
            cache=cache,
            table=table,
            position_offsets=[offset, 0],
        )
        beside = self.runner.logits(both)
        return torch.cat([after_prompt, alone, beside[:1]]).log_softmax(-1)
