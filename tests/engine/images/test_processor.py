"""A processor's tensors are told apart without a model."""

from types import SimpleNamespace

import torch

from cb_rollout.engine.images.processor import _per_token


def test_an_images_numbers_are_not_of_tokens_though_they_are_as_many():
    processor = SimpleNamespace(image_processor=SimpleNamespace(model_input_names=["patch_ids"]))
    tensors = {
        "patch_ids": torch.zeros(1, 5, 2, dtype=torch.int64),
        "mm_token_type_ids": torch.zeros(1, 5, dtype=torch.int64),
        "pixel_values": torch.zeros(1, 5),
    }
    assert _per_token(tensors, processor, 5) == {"mm_token_type_ids"}
