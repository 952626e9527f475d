"""Features of several images, computed in one call, divide into those of each."""

from dataclasses import dataclass

import pytest
import torch
from transformers.utils import ModelOutput

from cb_rollout.engine.images.encoder_cache import _divided, _joined, _outline, _slim

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
def test_a_batch_divides_into_the_features_of_each_image(encoded, num_images):
    outline = _outline(_slim(encoded(0)))
    seeds = range(num_images)
    divided = _divided(_slim(encoded(*seeds)), outline, num_images)
    for seed, features in zip(seeds, divided, strict=True):
        expected = _slim(encoded(seed))
        assert _outline(features) == _outline(expected) == outline
        pairs = zip(flat(features), flat(expected), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs)
    joined = flat(_joined([divided[1], divided[0]]))
    swapped = flat(_joined([_slim(encoded(1)), _slim(encoded(0))]))
    assert all(torch.equal(*pair) for pair in zip(joined, swapped, strict=True))


@pytest.mark.parametrize(
    "output",
    [
        torch.zeros(5, 4),
        torch.tensor(1.0),
        [torch.zeros(2, 4)] * 3,
        Features(deepstack_features=[torch.zeros(2, 4)] * NUM_LAYERS),
        "text",
    ],
)
def test_what_does_not_divide_is_not_divided(output):
    assert _divided(output, _outline(torch.zeros(1)), 2) is None
    assert _divided(output, [None, None], 2) is None
