"""Features of several images are those of each, joined."""

from dataclasses import dataclass

import pytest
import torch
from transformers.utils import ModelOutput

from cb_rollout.engine.images.encoder_cache import _joined, _slim

NUM_TOKENS, NUM_LAYERS = 3, 2


@dataclass
class Features(ModelOutput):
    """What an encoder returns."""

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | tuple | None = None
    deepstack_features: list | None = None


def numbers(*seeds):
    """NUM_TOKENS rows for each image, which differ."""
    return torch.cat([torch.full((NUM_TOKENS, 4), float(seed)) for seed in seeds])


def one_tensor(*seeds):
    return numbers(*seeds).view(len(seeds), NUM_TOKENS, 4)


def lists_of_images(*seeds):
    return Features(
        last_hidden_state=torch.zeros(1, 7),
        pooler_output=tuple(map(numbers, seeds)),
        deepstack_features=[tuple(map(numbers, seeds)) for _ in range(NUM_LAYERS)],
    )


def layers_of_rows(*seeds):
    layers = [numbers(*seeds) for _ in range(NUM_LAYERS)]
    return Features(pooler_output=numbers(*seeds), deepstack_features=layers)


def flat(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [tensor for value in values for tensor in flat(value)]


@pytest.mark.parametrize("encoded", [one_tensor, lists_of_images, layers_of_rows])
# As many images as layers: a list's length alone does not say of which it is.
@pytest.mark.parametrize("num_images", [2, 3])
def test_features_of_each_image_join_to_those_of_all(encoded, num_images):
    seeds = range(num_images)
    found = _joined([_slim(encoded(seed)) for seed in seeds])
    expected = _slim(encoded(*seeds))
    assert type(found) is type(expected)
    assert torch.equal(torch.cat(flat(found)), torch.cat(flat(expected)))
