"""Tensors of a prompt's images are divided, cut and told apart without a model."""

import pytest
import torch

from cb_rollout.engine.images.prompt_images import create_prompt_images, joined

# Two images of 4 and 2 tokens, in a prompt of 12.
SPANS = (range(3, 7), range(8, 10))
T, N = 12, 2


def images_of(tensors, spans=SPANS, num_images=N):
    per_token = frozenset(name for name in tensors if name.endswith("type_ids"))
    return create_prompt_images(tensors, spans, num_images, per_token, [9] * T)


def arguments(images, start, stop):
    names = frozenset({*images.images[0].tensors, *images.of_tokens})
    return images.arguments(start, stop, names, torch.device("cpu"))


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


GRIDS = torch.tensor([[1, 4, 4], [1, 2, 4]])


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"pixel_values": numbered(2, 3, 5, 5)}, (0, [1, 1])),
        ({"pixel_values": numbered(24, 6), "image_grid_thw": GRIDS}, (0, [16, 8])),
        ({"pixel_values": numbered(6, 6), "image_grid_thw": GRIDS}, (0, [4, 2])),
        ({"pixel_values": numbered(5, 6), "num_tiles": torch.tensor([4, 1])}, (0, [4, 1])),
        ({"pixel_values": numbered(1, 2, 3, 5, 5)}, (1, [1, 1])),
        # In proportion to the tokens.
        ({"pixel_values": numbered(3, 3, 5, 5)}, (0, [2, 1])),
    ],
    ids=["a row each", "grids", "merged grids", "counts", "one row", "tokens"],
)
def test_tensors_divide_by_rows_grids_counts_or_tokens(tensors, expected):
    images = images_of(tensors)
    parts = [image.tensors["pixel_values"] for image in images.images]
    dim, sizes = expected
    assert images.dims["pixel_values"] == dim
    assert [part.shape[dim] for part in parts] == sizes
    assert torch.equal(joined(parts, dim), tensors["pixel_values"])
    assert torch.equal(arguments(images, 0, T)["pixel_values"], tensors["pixel_values"])


def test_tensors_that_nothing_divides_belong_to_all_images():
    images = images_of({"pixel_values": numbered(5, 6)})
    assert not images.is_divided
    assert [image.tokens for image in images.images] == [range(3, 10)]
    assert images.num_resumable(8) == 0
    assert images.num_resumable(10) == 10


def test_a_forward_begins_before_an_image_or_after_it():
    images = images_of({"pixel_values": numbered(2, 3, 5, 5)})
    assert images.num_resumable(9) == 0, "until an engine allows it"
    images.may_be_cut = True
    assert [images.num_resumable(n) for n in (0, 2, 3, 5, 7, 8, 9, 10, 11)] == [
        *(0, 2, 3, 3, 7, 8, 8, 10, 11)
    ]


def test_a_cut_forward_is_given_its_own_images_and_tokens():
    pixels, types = numbered(2, 3), torch.arange(T)[None]
    images = images_of({"pixel_values": pixels, "token_type_ids": types})
    cut = arguments(images, 7, 14)
    assert torch.equal(cut["pixel_values"], pixels[1:])
    # After the prompt comes text.
    assert cut["token_type_ids"].tolist() == [[7, 8, 9, 10, 11, 0, 0]]
    before = images.before(1)
    assert torch.equal(arguments(before, 0, 8)["pixel_values"], pixels[:1])
    assert arguments(before, 0, 8)["token_type_ids"].tolist() == [[*range(8)]]
    assert [image.tokens for image in before.images] == [SPANS[0]]
    assert before.num_prompt_tokens == 8


def test_images_are_told_apart_by_their_tensors():
    def digests(first, second):
        images = images_of({"pixel_values": torch.stack([first, second])})
        return [image.digest for image in images.images]

    dark, bright = torch.zeros(3, 4), torch.ones(3, 4)
    one, other = digests(dark, bright)
    assert one != other
    assert digests(dark, dark)[0] == one
    assert digests(dark.half(), bright.half())[0] != one
    (alone,) = images_of({"pixel_values": dark[None]}, SPANS[:1], 1).images
    assert alone.digest == one, "whatever stands beside it"


def test_keys_are_of_one_image_where_a_forward_may_begin_after_it():
    dark, bright = torch.zeros(3, 4), torch.ones(3, 4)
    ids = list(range(T))
    one, other = (
        images_of({"pixel_values": torch.stack([dark, second])}) for second in (dark, bright)
    )
    assert one.cache_keys(ids, 0, 7) != other.cache_keys(ids, 0, 7)
    one.may_be_cut = other.may_be_cut = True
    assert one.cache_keys(ids, 0, 8) == other.cache_keys(ids, 0, 8)
    assert one.cache_keys(ids, 8, 10) != other.cache_keys(ids, 8, 10)
    assert one.cache_keys(ids, 10, 12) == ids[10:]
