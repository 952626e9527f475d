"""One check for every type that reads images: the engine against the plain forward and `generate`.

Prompts without an image, with one and with two run side by side, greedy and in sampled groups. Then
they run again, on the prefixes that the first batch left in the cache. Other pictures must give
other log-probabilities, or none of it would show that pictures are read.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import image_needs
import torch
from images import create, picture, plain_logprobs, prompt, read
from parity import ROUNDING_SHARE, TOLERANCE
from transformers import PreTrainedModel

from cb_rollout import GenerationOutput, RolloutConfig, RolloutGenerator, SamplingParams

# Of a first and a second picture, in pixels.
SIZES = ((48, 64), (90, 40))
NEW_TOKENS = 6
GROUP_SIZE = 2
GREEDY = SamplingParams(do_sample=False, max_new_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)


@dataclass
class ImageParity:
    """What the check found."""

    drift: float = 0.0
    """Largest |log-probability - plain forward's|, in nats."""
    rounding: float = 0.0
    """Largest |plain forward - plain forward in float64|; measured where the drift is large."""
    effect: float = math.inf
    """Least change of some log-probability by another last picture, in nats."""
    is_as_generate: bool = True
    """Whether the greedy tokens are those of the model's own `generate`."""

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, ROUNDING_SHARE * self.rounding)


def check(model_type: str) -> ImageParity:
    """Run the engine on a type's tiny model, and compare everything it says.

    Raises:
        ConfigurationError: the engine refuses the model, or its images.
    """
    model, processor = create(model_type)
    sizes = SIZES[:1] if model_type in image_needs.ONE_IMAGE else SIZES
    pictures = [picture(seed, size) for seed, size in enumerate(sizes)]
    inputs = [read(model, processor, pictures[:n]) for n in range(len(pictures) + 1)]
    rows = [inputs[0]["input_ids"][0].tolist()]
    rows += [
        {"prompt": prompt(processor, n), "images": pictures[:n]} for n in range(1, len(inputs))
    ]
    found = ImageParity()
    config = RolloutConfig(seed=0, block_size=4)
    with RolloutGenerator(model, config, tokenizer=processor) as generator:
        for is_again in (False, True):
            greedy = generator.generate_batch(rows, sampling_params=GREEDY)
            groups = generator.generate_batch(
                rows, sampling_params=SAMPLED, num_return_sequences=GROUP_SIZE
            )
            for tensors, output in zip(inputs, greedy.values(), strict=True):
                compare(model, tensors, output, found)
                if not is_again:
                    compare_with_generate(model, tensors, output, found)
            for index, output in enumerate(groups.values()):
                compare(model, inputs[index // GROUP_SIZE], output, found)
    for number, output in enumerate(list(greedy.values())[1:]):
        others = [*pictures[:number], picture(2, sizes[number])]
        own, changed = (
            plain_logprobs(model, tensors, output.generated_tokens)
            for tensors in (inputs[number + 1], read(model, processor, others))
        )
        found.effect = min(found.effect, (changed - own).abs().max().item())
    return found


def compare(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    output: GenerationOutput,
    found: ImageParity,
) -> None:
    """Hold an output against a plain forward with the same images."""
    assert output.prompt_ids == inputs["input_ids"][0].tolist()
    tokens = torch.tensor(output.generated_tokens)[:, None]
    chosen = plain_logprobs(model, inputs, output.generated_tokens).gather(-1, tokens)[:, 0]
    drift = (chosen - torch.tensor(output.logprobs)).abs().max().item()
    found.drift = max(found.drift, drift)
    if drift > TOLERANCE:
        exact_model = copy.deepcopy(model).double()
        # The fused kernels of experts know no float64.
        exact_model.set_experts_implementation("eager")
        exact = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
        expected = plain_logprobs(exact_model, exact, output.generated_tokens)
        rounding = (chosen - expected.gather(-1, tokens)[:, 0]).abs().max().item()
        found.rounding = max(found.rounding, rounding)


def compare_with_generate(
    model: PreTrainedModel,
    inputs: Mapping[str, torch.Tensor],
    output: GenerationOutput,
    found: ImageParity,
) -> None:
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)[0].tolist()
    found.is_as_generate &= tokens == output.prompt_ids + output.generated_tokens
