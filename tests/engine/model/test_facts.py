import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from cb_rollout import ConfigurationError
from cb_rollout.engine.model.facts import ModelFacts


class Wrapper(torch.nn.Module):
    """Holds a model as DDP and accelerate do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def facts_of_class(facts):
    return facts.argument_names, facts.takes_any_argument, facts.cache_argument, facts.name


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "lfm2"])
def test_a_wrapped_model_has_the_facts_of_the_model_inside(family):
    model = tiny_model(family)
    plain = ModelFacts.of(model)
    wrapped = ModelFacts.of(Wrapper(model))
    assert plain.given is plain.module is plain.outermost is model
    assert wrapped.module is model
    assert facts_of_class(wrapped) == facts_of_class(plain)
    assert {"input_ids", "attention_mask"} <= plain.argument_names
    assert plain.cache_argument in ("cache", "past_key_values")
    assert not (plain.is_split)
    assert not (plain.is_quantized)


def test_the_outermost_module_is_the_one_that_may_compute_something_itself():
    peft_model = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM"))
    assert ModelFacts.of(torch.nn.DataParallel(peft_model)).outermost is peft_model


def test_a_forward_that_was_replaced_on_the_instance_keeps_the_names_of_its_class():
    model = tiny_model()
    expected = ModelFacts.of(model).argument_names
    model.forward = lambda *args, **kwargs: None
    assert ModelFacts.of(model).argument_names == expected


def test_what_holds_no_transformers_model_is_refused():
    with pytest.raises(ConfigurationError, match="pass a transformers causal language model"):
        ModelFacts.of(torch.nn.Linear(2, 2))
