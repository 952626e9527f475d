"""What a user's own object computes, its wrappers included, is what is sampled, or it is refused.

The reference is a plain forward through the object that the user holds, never the module inside.
"""

import pytest
import torch
from adapters import INVOCATION, METHODS, adapted
from peft import LoraConfig
from tiny import largest_difference, plain_logprobs, tiny_model
from tiny_trainer import tiny_trainer

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    attach,
    packed_logprobs,
)
from cb_rollout.engine.service.manager import ContinuousBatchingManager

PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, seed=1)
PROMPT = [5, 6, 7, 8, *INVOCATION, 9, 10, 11]

PROMPT_LEARNING = "prompt-learning adapters are not supported"
WRAPPER = "the wrapper computes something itself"
REFUSED = {
    "CARTRIDGE": PROMPT_LEARNING,
    "CPT": PROMPT_LEARNING,
    "LILY": "depends on what else is in the forward",
    "LORA (activated)": WRAPPER,
    "MULTITASK_PROMPT_TUNING": PROMPT_LEARNING,
    "POLY": "does not run on token ids alone",
    "PREFIX_TUNING": PROMPT_LEARNING,
    "PROMPT_TUNING": PROMPT_LEARNING,
    "P_TUNING": PROMPT_LEARNING,
    "SHADOW": "cannot run on a paged cache",
    "XLORA": WRAPPER,
}
FAST = ("LORA", "LORA (activated)", "PREFIX_TUNING")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in FAST else [pytest.mark.slow])
        for method in METHODS
    ],
)
@pytest.mark.filterwarnings("ignore")  # What a method warns of when its adapter is made.
def test_an_adapter_is_sampled_as_its_own_forward_computes_it_or_is_refused(method, tmp_path):
    model = adapted(method, tmp_path)
    config = RolloutConfig(seed=0, weight_sync="shared")
    if method in REFUSED:
        with pytest.raises(ConfigurationError, match=REFUSED[method]):
            RolloutGenerator(model, config)
        return
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch(
            [PROMPT, PROMPT[:4]], num_return_sequences=2, sampling_params=PARAMS
        ).values()
        assert largest_difference(model, outputs) <= 1e-4
        assert generator.verify(4).max <= 1e-4
    assert _differs(model, tiny_model("llama"))
    packed = packed_logprobs(model, outputs)
    for output, logprobs in zip(outputs, packed, strict=True):
        plain = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert logprobs.tolist() == pytest.approx(plain, abs=1e-4)


def _differs(model, base):
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        return not torch.allclose(model(input_ids=ids).logits, base(ids).logits, atol=1e-3)


class Scaled(torch.nn.Module):
    """A wrapper that divides the logits of the model inside."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments, **named):
        output = self.module(*arguments, **named)
        output.logits = output.logits / 2
        return output


class Shifted(Scaled):
    """A wrapper that changes the tokens which the model inside reads."""

    def forward(self, input_ids, **named):
        return self.module(input_ids=(input_ids + 1) % 256, **named)


class Watched(Scaled):
    """A wrapper that only counts its calls."""

    num_calls = 0

    def forward(self, *arguments, **named):
        self.num_calls += 1
        return self.module(*arguments, **named)


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
@pytest.mark.parametrize("wrapper", [Scaled, Shifted])
def test_a_wrapper_that_computes_something_itself_is_refused(wrapper, weight_sync):
    model = wrapper(tiny_model())
    with pytest.raises(ConfigurationError, match=f"inside the {wrapper.__name__} that trains"):
        RolloutGenerator(model, RolloutConfig(weight_sync=weight_sync))


def test_a_manager_refuses_a_wrapper_that_computes_something_itself():
    with pytest.raises(ConfigurationError, match=WRAPPER):
        ContinuousBatchingManager(Scaled(tiny_model()))


def test_a_wrapper_that_is_followed_later_is_refused_then():
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        generator.follow(Watched(model))
        with pytest.raises(ConfigurationError, match=WRAPPER):
            generator.follow(Scaled(model))


@pytest.mark.parametrize("wrap", [Watched, torch.nn.DataParallel])
def test_a_wrapper_that_only_passes_a_forward_on_is_sampled(wrap):
    model = wrap(tiny_model())
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert largest_difference(model, [output]) <= 1e-4
        assert generator.verify(1).max <= 1e-4


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_a_forward_that_was_replaced_since_is_seen_by_verify(weight_sync):
    """A wrapper that begins to scale after the engine was made."""

    class Later(Scaled):
        factor = 1.0

        def forward(self, *arguments, **named):
            output = self.module(*arguments, **named)
            output.logits = output.logits * self.factor
            return output

    model = Later(tiny_model())
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync=weight_sync)) as generator:
        generator.generate_batch([PROMPT], sampling_params=PARAMS)
        assert generator.verify(1).max <= 1e-4
        model.factor = 0.5
        assert generator.verify(1).max > 0.1


@pytest.mark.parametrize("wrapper", [Scaled, Shifted])
def test_packed_logprobs_refuses_a_wrapper_that_computes_something_itself(wrapper):
    model = tiny_model()
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        outputs = generator.generate_batch([PROMPT], sampling_params=PARAMS)
    packed_logprobs(model, outputs)
    with pytest.raises(ConfigurationError, match=f"{wrapper.__name__} computes other log-prob"):
        packed_logprobs(wrapper(model), outputs)


def test_packed_logprobs_refuses_an_activated_lora(tmp_path):
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        outputs = generator.generate_batch([PROMPT], sampling_params=PARAMS)
    model = adapted("LORA (activated)", tmp_path)
    with pytest.raises(ConfigurationError, match="alora_invocation_tokens"):
        packed_logprobs(model, outputs)


@pytest.mark.parametrize("bf16", [False, True])
def test_attach_refuses_an_activated_lora(tmp_path, bf16):
    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "up_proj"],
        alora_invocation_tokens=INVOCATION,
        init_lora_weights=False,
    )
    trainer = tiny_trainer(tmp_path, bf16=bf16, trainer_arguments={"peft_config": config})
    with pytest.raises(ConfigurationError, match=WRAPPER):
        attach(trainer)
