"""What a user's own object computes, its wrappers included, is what is sampled, or it is refused.

The reference is a plain forward through the object that the user holds, never the module inside.
"""

import pytest
import torch
from adapters import INVOCATION, METHODS, adapted
from nightly import some_slow
from peft import LoraConfig
from tiny import largest_difference, plain_logprobs, tiny_model
from tiny_trainer import tiny_trainer

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    attach,
    generate_batch,
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
    "LILY": "depend on what else is in the forward",
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


@pytest.mark.parametrize("method", some_slow(METHODS, FAST, every=3))
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


@pytest.mark.fast_cases("XLORA")
@pytest.mark.parametrize("method", ["LILY", "LORA (activated)", "SHADOW", "XLORA"])
@pytest.mark.filterwarnings("ignore")  # What a method warns of when its adapter is made.
def test_an_adapter_that_still_does_nothing_is_refused_as_it_is_later(method, tmp_path):
    """Its weights begin at zero, and then it computes what the base model does."""
    model = adapted(method, tmp_path, is_fresh=True)
    with pytest.raises(ConfigurationError, match=REFUSED[method]):
        RolloutGenerator(model, RolloutConfig(weight_sync="shared"))


@pytest.mark.filterwarnings("ignore")
def test_packed_logprobs_refuses_an_adapter_that_still_does_nothing(tmp_path):
    with RolloutGenerator(tiny_model("llama"), RolloutConfig(seed=0)) as generator:
        outputs = generator.generate_batch([PROMPT, PROMPT[:5]], sampling_params=PARAMS)
    with pytest.raises(ConfigurationError, match="computes different log-probabilities for packed"):
        packed_logprobs(adapted("LILY", tmp_path, is_fresh=True), outputs)


@pytest.mark.parametrize(
    "method", some_slow([method for method in METHODS if method not in REFUSED], FAST, every=3)
)
@pytest.mark.filterwarnings("ignore")
def test_a_check_moves_no_weight_of_a_fresh_adapter(method, tmp_path):
    model = adapted(method, tmp_path, is_fresh=True)
    before = [(p, p._version, p.detach().clone()) for p in model.parameters()]
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        outputs = generator.generate_batch([PROMPT], sampling_params=PARAMS)
        packed_logprobs(model, outputs)
        assert largest_difference(model, outputs.values()) <= 1e-4
    after = list(model.parameters())
    assert [id(p) for p, _, _ in before] == list(map(id, after))
    assert [version for _, version, _ in before] == [p._version for p in after]
    assert all(torch.equal(values, p) for (_, _, values), p in zip(before, after, strict=True))


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


class Tempered(Scaled):
    """A wrapper with a scale that trains, and begins at 1."""

    def __init__(self, module):
        super().__init__(module)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, *arguments, **named):
        output = self.module(*arguments, **named)
        output.logits = output.logits * self.scale
        return output


def hooked(wrapper):
    def halve(_module, _arguments, output):
        output.logits = output.logits / 2

    wrapper.register_forward_hook(halve)


def replaced(wrapper):
    own = wrapper.forward
    wrapper.forward = lambda input_ids, **named: own(input_ids=(input_ids + 1) % 256, **named)


def trained(wrapper):
    with torch.no_grad():
        wrapper.scale.fill_(0.5)


@pytest.mark.fast_cases("hooked-shared")
@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
@pytest.mark.parametrize("change", [hooked, replaced, trained])
def test_a_wrapper_that_begins_to_compute_something_is_refused_at_the_next_sync(
    change, weight_sync
):
    model = Tempered(tiny_model())
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync=weight_sync)) as generator:
        generator.sync_weights()
        change(model)
        with pytest.raises(ConfigurationError, match=WRAPPER):
            generator.sync_weights()


def test_an_activated_lora_that_is_switched_on_later_is_refused(tmp_path):
    model = adapted("LORA", tmp_path)
    settings = {"target_modules": ["q_proj"], "alora_invocation_tokens": INVOCATION}
    model.add_adapter("later", LoraConfig(task_type="CAUSAL_LM", **settings))
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        model.set_adapter("later")
        with pytest.raises(ConfigurationError, match=WRAPPER):
            generator.sync_weights()


def test_a_kept_manager_generates_with_the_module_that_its_wrapper_has_now():
    model = Watched(tiny_model())
    arguments = {"sampling_params": PARAMS, "persistent_manager": True, "progress_bar": False}
    generate_batch(model, [PROMPT], **arguments)
    model.module = tiny_model(seed=1)
    outputs = generate_batch(model, [PROMPT], **arguments)
    assert largest_difference(model, outputs.values()) <= 1e-4


class Empty(Scaled):
    def __len__(self):
        return 0


def test_a_wrapper_without_a_length_is_a_wrapper():
    with pytest.raises(ConfigurationError, match=WRAPPER):
        RolloutGenerator(Empty(tiny_model()), RolloutConfig(weight_sync="shared"))


def test_a_model_compiled_by_torch_is_the_model_inside():
    model = torch.compile(tiny_model(), backend="eager")
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        (output,) = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        assert generator.verify(1).max <= 1e-4
        assert largest_difference(model._orig_mod, [output]) <= 1e-4


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
    with pytest.raises(ConfigurationError, match=f"{wrapper.__name__} computes different log-prob"):
        packed_logprobs(wrapper(model), outputs)


def test_packed_logprobs_refuses_an_activated_lora(tmp_path):
    with RolloutGenerator(tiny_model(), RolloutConfig(seed=0)) as generator:
        outputs = generator.generate_batch([PROMPT], sampling_params=PARAMS)
    model = adapted("LORA (activated)", tmp_path)
    with pytest.raises(ConfigurationError, match="alora_invocation_tokens"):
        packed_logprobs(model, outputs)


@pytest.mark.fast_cases("False")
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
