"""Every adapter of PEFT is packed with its plain scores and gradients, or a sentence says why not.

Not built: AdaMSS needs scikit-learn. X-LoRA reads adapters from a folder.
"""

import dataclasses

import pytest
import torch
from peft import LoraConfig, XLoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny import tiny_model

from cb_rollout import ConfigurationError, packed_logprobs

VOCABULARY = 64

# What a method needs beside its defaults, at the sizes of the tiny model.
NEEDS = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "C3A": {"block_size": 16},
    "IA3": {"feedforward_modules": []},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "P_TUNING": {"encoder_hidden_size": 16},
    "ROAD": {"group_size": 16},
    "SHADOW": {"target_modules": None},
    "SHIRA": {"r": 2},
    # PEFT 0.21 leaves its vectors unset otherwise.
    "TINYLORA": {"init_weights": True},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4], "target_modules": None},
    "VBLORA": {"vector_length": 16},
    "WAVEFT": {"n_frequency": 64},
}
NOT_BUILT = {"ADAMSS", "XLORA"}
REFUSED = {
    **dict.fromkeys(
        ("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING"), "prompt-learning adapters"
    ),
    **dict.fromkeys(("PREFIX_TUNING", "PROMPT_TUNING"), "prompt-learning adapters"),
    # Its experts are weighed by the mean over all tokens of a forward.
    "LILY": "computes other log-probabilities packed than alone .* call its own forward",
    "POLY": r"cannot run on token ids alone \(.*task_ids should not be None.* call its own forward",
}
METHODS = sorted({str(getattr(kind, "value", kind)) for kind in PEFT_TYPE_TO_CONFIG_MAPPING})
FAST = {"ADAPTION_PROMPT", "LORA", "LILY", "POLY", "SHADOW", "PREFIX_TUNING"}
MARKED = [
    pytest.param(method, marks=() if method in FAST else pytest.mark.slow)
    for method in METHODS
    if method not in NOT_BUILT
]

ROWS = [([3, 4, 5, 6], [7, 8, 9]), ([3, 4, 5, 6], [8, 9]), ([9, 10], [11, 12, 13])]


@dataclasses.dataclass
class Output:
    """What `packed_logprobs` reads of an output."""

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]


OUTPUTS = [Output(f"r{n}", *row) for n, row in enumerate(ROWS)]


def adapted(method):
    """A tiny Llama with an adapter that changes what it computes."""
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[method]
    names = {field.name for field in dataclasses.fields(config_class)}
    settings = {"target_modules": ["q_proj", "v_proj"], "num_virtual_tokens": 4}
    settings |= {"init_weights": False, "init_lora_weights": False} | NEEDS.get(method, {})
    if method == "ADALORA":
        del settings["init_lora_weights"]
    known = {n: v for n, v in settings.items() if n in names and v is not None}
    torch.manual_seed(0)
    base = tiny_model("llama", vocab_size=VOCABULARY)
    model = get_peft_model(base, config_class(task_type="CAUSAL_LM", **known))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def plain(model):
    found = []
    for output in OUTPUTS:
        ids = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(output.prompt_ids) - 1 : -1]
        labels = ids[0, len(output.prompt_ids) :, None]
        found.append(logits.log_softmax(-1).gather(1, labels)[:, 0])
    return torch.cat(found)


def gradients_of(model, logprobs):
    model.zero_grad()
    (logprobs * torch.linspace(1, 2, len(logprobs))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:Detected that the base layer has no bias term:UserWarning")
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor to 1:UserWarning")
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("method", MARKED)
def test_an_adapter_is_packed_or_refused_in_a_sentence(method):
    model = adapted(method)
    if method in REFUSED:
        with pytest.raises(ConfigurationError, match=REFUSED[method]):
            packed_logprobs(model, OUTPUTS)
        return
    packed, expected = torch.cat(packed_logprobs(model, OUTPUTS)), plain(model)
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)
    own, right = gradients_of(model, packed), gradients_of(model, expected)
    assert own.keys() == right.keys()
    assert own
    for name, gradient in right.items():
        assert (own[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_a_wrapper_that_runs_the_model_twice_is_refused_in_a_sentence(tmp_path):
    """X-LoRA weighs its adapters by the hidden states of a forward before."""
    base = tiny_model("llama", vocab_size=VOCABULARY)
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path)
    base = tiny_model("llama", vocab_size=VOCABULARY)
    base.config.use_cache = False
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=64, adapters={"0": str(tmp_path)}, xlora_depth=1
    )
    model = get_peft_model(base, config).eval()
    with pytest.raises(ConfigurationError, match=r"cannot be packed under Peft.* stops at packed"):
        packed_logprobs(model, OUTPUTS)


class Deaf(torch.nn.Module):
    """Has a copy of the forward of the model that it wraps."""

    def __init__(self, module, num_calls):
        super().__init__()
        self.module = module
        self.num_calls = num_calls

    def forward(self, **named):
        for _ in range(self.num_calls - 1):
            self.module(**named)
        if self.num_calls:
            return self.module(**named)
        return type(self.module).forward(self.module, **named)


@pytest.mark.parametrize(
    ("num_calls", "words"), [(0, "does not call the model's forward"), (2, "more than once")]
)
def test_a_wrapper_that_calls_another_forward_is_refused_in_a_sentence(num_calls, words):
    model = Deaf(tiny_model("llama", vocab_size=VOCABULARY), num_calls)
    with pytest.raises(ConfigurationError, match=rf"under Deaf, which .*{words}; call its own"):
        packed_logprobs(model, OUTPUTS)
