"""A bitsandbytes base with LoRA on top rolls out unmerged, in place, from what the trainer runs."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import SHARPNESS, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from cb_rollout import (
    ConfigurationError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    packed_logprobs,
)

pytest.importorskip("bitsandbytes", reason="quantised bases are tested where it is installed")

BATCH = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(0))
KINDS = {
    "4bit": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    # Above a threshold whole columns leave int8, which makes a row depend on its batch.
    "8bit": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
}


def quantised(folder, config):
    tiny_model().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


@pytest.fixture(params=KINDS)
def model(request, tmp_path):
    base = quantised(tmp_path, KINDS[request.param])
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return get_peft_model(base, lora)


def some_outputs(model):
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        prompts = [[5, 6, 7], [5, 6, 7], [8, 9]]
        return [*generator.generate_batch(prompts, sampling_params=params).values()]


@pytest.mark.parametrize("is_training", [False, True])
def test_packed_log_probabilities_are_those_of_the_plain_forward_in_the_models_mode(
    model, is_training
):
    """On a CPU bitsandbytes 0.50 quantises activations in evaluation mode alone, in 8 bits."""
    outputs = some_outputs(model)
    model.train(is_training)
    found = packed_logprobs(model, outputs, temperature=1.0)
    assert all(values.requires_grad for values in found)
    for values, output in zip(found, outputs, strict=True):
        ids = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(output.prompt_ids) - 1 : -1]
        labels = ids[0, len(output.prompt_ids) :, None]
        right = logits.log_softmax(-1).gather(1, labels)[:, 0]
        torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)


def test_a_row_that_depends_on_its_batch_is_refused_with_the_threshold_to_set(tmp_path):
    outputs = some_outputs(tiny_model())
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=1.0)
    words = "llm_int8_threshold=1.0 its 8-bit layers .* load it with llm_int8_threshold=0.0"
    with pytest.raises(ConfigurationError, match=words):
        packed_logprobs(quantised(tmp_path, config), outputs)


def packed(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}


def test_log_probabilities_are_those_of_the_trainers_forward_after_every_step(model):
    assert {p.dtype for p in model.parameters()} > {torch.float32}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    before, versions, drifts = packed(model), [], []
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        assert generator.manager.model is model.get_base_model()
        for _ in range(3):
            model.train()
            model(input_ids=BATCH, labels=BATCH).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert generator.sync_weights().bytes_copied == 0
            outputs = generator.generate_batch([[5, 6, 7], [8, 9]], sampling_params=params)
            versions.append([o.logprobs for o in outputs.values()])
            drifts.append(generator.verify(2).max)
    assert max(drifts) <= SHARPNESS * 1e-5
    assert versions[0] != versions[1] != versions[2]
    assert all(torch.equal(p, packed(model)[name]) for name, p in before.items())


def test_a_copy_of_packed_weights_is_refused_with_what_to_use(model):
    with pytest.raises(ConfigurationError, match="use 'shared'"):
        RolloutGenerator(model, RolloutConfig(weight_sync="copy"))
