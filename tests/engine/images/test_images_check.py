"""What the check of prompts with images finds, and that it changes nothing."""

from dataclasses import replace

import pytest
import torch
from images import create, picture, prompt

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.attention import selector
from cb_rollout.engine.attention.cpu.backend import CpuBackend
from cb_rollout.engine.images.check import check_images

# The models' own warnings, about weights and settings that only a tiny model has.
pytestmark = pytest.mark.filterwarnings("default")

SIZES = ((48, 64), (90, 40))


class WrongAfterImages(CpuBackend):
    """Decodes another token where a row has images, far beyond what 16 bits round."""

    def prepare(self, batch):
        if any(batch.position_offsets):
            batch = replace(batch, new_tokens=[[7] for _ in batch.new_tokens])
        return super().prepare(batch)


def row_of(processor, num_images):
    pictures = [picture(seed, size) for seed, size in enumerate(SIZES[:num_images])]
    return {"prompt": prompt(processor, num_images), "images": pictures}


def generator_of(model, processor):
    return RolloutGenerator(model, RolloutConfig(seed=0, block_size=4), tokenizer=processor)


def test_images_that_were_refused_are_refused_again(monkeypatch):
    """In 16 bits the last comparison is that of the backend, after the one of the layout."""
    monkeypatch.setattr(selector, "BACKENDS", [WrongAfterImages])
    model, processor = create("qwen2_5_vl")
    with generator_of(model.bfloat16(), processor) as generator:
        assert isinstance(generator.manager.engine.runner.attention_backend, WrongAfterImages)
        for num_images in (1, 2, 1, 2):
            with pytest.raises(ConfigurationError, match="cannot run prompts with images"):
                generator.generate_batch([row_of(processor, num_images)], max_new_tokens=2)
        assert generator.manager.engine.request_checks.images.cuts == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_the_check_of_images_leaves_the_runner_as_it_is(model_type, dtype):
    model, processor = create(model_type)
    with generator_of(model.to(dtype), processor) as generator:
        manager = generator.manager
        runner = manager.engine.runner
        before = runner.execution
        params = SamplingParams(max_new_tokens=2)
        (request,) = manager.input_processor.requests([row_of(processor, 2)], [params])
        found = check_images(
            runner, manager.engine.paged_model.layout, request.prompt_ids, request.images
        )
        assert runner.execution is before
        assert manager.engine.request_checks.images.cuts == {}
        assert not runner.image_inputs.casts_pixels
        manager.check_images([request])
        assert manager.engine.request_checks.images.cuts == {request.images.kind: found.may_cut}
        assert runner.image_inputs.casts_pixels is found.casts_pixels
