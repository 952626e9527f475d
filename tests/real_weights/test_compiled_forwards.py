"""Compiled forwards of a real model round as its own do: SmolLM2-135M-Instruct.

Rounding errors of random weights are alike from token to token. Those of a real model have one
cause at each token, and are ten times smaller or larger by chance.
"""

import pytest
import torch
from graph_faults import FAULTS
from transformers import AutoModelForCausalLM, AutoTokenizer

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.errors import ConfigurationError
from measure.agreement import chats, distance, plain_logprobs, sampled_logprobs

pytestmark = pytest.mark.slow

PATHS = ("varlen_compile_config", "decode_compile_config")
DYNAMIC = {"dynamic": True, "mode": None}

# Inductor takes seconds for each layer.
FEW_LAYERS = 2

# Mean and largest distance to the plain forward, in nats.
ALLOWED = {torch.float32: (2e-5, 2e-4), torch.bfloat16: (0.05, 0.5)}


@pytest.fixture(scope="module")
def prompts(smollm2):
    return chats(AutoTokenizer.from_pretrained(smollm2), 4)


def load(folder, dtype=torch.float32, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **settings).eval()


def assert_as_the_plain_forward(model, prompts, compiled, **settings):
    params = SamplingParams(temperature=1.0, max_new_tokens=16)
    with RolloutGenerator(model, RolloutConfig(seed=0, **settings)) as generator:
        outputs = list(generator.generate_batch(prompts, sampling_params=params).values())
        paths = {path.part: path.text for path in generator.manager.engine.paged_model.paths}
    for part in compiled:
        assert paths[part].split(", ")[-1] == "compiled"
    mean, largest = ALLOWED[model.dtype]
    found = distance(sampled_logprobs(outputs), plain_logprobs(model, outputs))
    assert found["mean"] <= mean, found
    assert found["max"] <= largest, found


def test_compiled_forwards_of_the_whole_model_are_accepted(smollm2, prompts):
    settings = dict.fromkeys(PATHS, DYNAMIC | {"backend": "eager"})
    assert_as_the_plain_forward(load(smollm2), prompts, ["prefill", "forwards"], **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("settings", "compiled"),
    [
        ({"varlen_compile_config": DYNAMIC}, ["prefill"]),
        ({"default_compile_level": 1}, ["prefill", "forwards"]),
    ],
    ids=["config", "level"],
)
def test_inductor_compiles_real_layers(smollm2, prompts, settings, compiled, dtype):
    model = load(smollm2, dtype, num_hidden_layers=FEW_LAYERS)
    assert_as_the_plain_forward(model, prompts, compiled, **settings)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fault",
    [
        "RoPE frequencies off by 1%",
        "one head missing in one layer",
        "attention leaks between rows",
    ],
)
def test_a_fault_stands_out_of_the_rounding_of_real_layers(smollm2, fault, path):
    model = load(smollm2, num_hidden_layers=FEW_LAYERS)
    config = RolloutConfig(**{path: DYNAMIC | {"backend": FAULTS[fault]}})
    with pytest.raises(ConfigurationError, match=r"computes something else: .* beyond the model's"):
        RolloutGenerator(model, config)
