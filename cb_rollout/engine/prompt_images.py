"""Hold the images of a prompt: the tensors that a forward takes, and what tells pictures apart.

Made in the caller's thread, shared by the sequences of a group, and read by the thread that steps
the engine. Tensors stay in system memory, because a preempted sequence needs them again; a forward
copies them to its device.

T: tokens of the prompt.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens of a prompt that stand for one image, or for several that cannot be told apart."""

    start: int
    stop: int
    """Index after the last token."""
    digest: bytes
    """Hash of the pixels."""


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt."""

    tensors: Mapping[str, torch.Tensor]
    """Arguments of the model's forward by name, as its processor makes them, on the CPU."""
    spans: tuple[ImageSpan, ...]
    """In the order of the prompt; at least one."""
    num_prompt_tokens: int
    """T."""
    position_offset: int | None = None
    """Position of a token after the images, less its index in the sequence; negative where an image
    takes fewer positions than tokens. None: not computed yet."""

    @property
    def num_tokens(self) -> int:
        """Return the tokens up to the end of the last image: one forward computes them."""
        return self.spans[-1].stop

    @property
    def digest(self) -> bytes:
        """Return a hash of all the images."""
        return hashlib.blake2b(b"".join(span.digest for span in self.spans)).digest()

    def arguments(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Return the tensors for a forward of the first `num_tokens` tokens of a sequence.

        A tensor with a number for each prompt token is cut, or continued with zeros: sampled tokens
        are text.
        """
        return {name: self._fitted(tensor, num_tokens) for name, tensor in self.tensors.items()}

    def _fitted(self, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
        if not is_per_token(tensor, self.num_prompt_tokens):
            return tensor
        missing = num_tokens - self.num_prompt_tokens
        if missing <= 0:
            return tensor[:, :num_tokens]
        return torch.cat([tensor, tensor.new_zeros(1, missing, *tensor.shape[2:])], 1)

    def cache_keys(self, token_ids: Sequence[int], start: int, stop: int) -> list[Hashable]:
        """Return what identifies the tokens from `start` to `stop`: ids, and of images the pixels.

        A token of an image is its id, the hash of all the prompt's pictures and its index within
        the image: what a processor makes of one picture may depend on those beside it. So prompts
        with equal placeholders and other pictures share nothing.
        """
        keys: list[Hashable] = list(token_ids[start:stop])
        digest = self.digest
        for span in self.spans:
            for index in range(max(start, span.start), min(stop, span.stop)):
                keys[index - start] = token_ids[index], digest, index - span.start
        return keys


def is_per_token(tensor: torch.Tensor, num_tokens: int) -> bool:
    """Return whether a tensor holds integers for each of a prompt's tokens, `[1, T, ...]`."""
    return not tensor.is_floating_point() and tensor.shape[:2] == (1, num_tokens)
