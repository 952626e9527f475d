"""Every adapter of PEFT is packed with its plain scores and gradients, or is refused."""

import dataclasses

import pytest
import torch
from adapters import METHODS, adapted, with_named_adapters
from nightly import some_slow
from tiny import tiny_model

from cb_rollout import ConfigurationError, GenerationOutput, packed_logprobs

REFUSED = {
    **dict.fromkeys(
        ("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING"), "prompt-learning adapters"
    ),
    **dict.fromkeys(("PREFIX_TUNING", "PROMPT_TUNING"), "prompt-learning adapters"),
    "LORA (activated)": "alora_invocation_tokens",
    "XLORA": "stops at packed scores",
    # Its experts are weighed by the mean over all tokens of a forward.
    "LILY": "computes different log-probabilities for packed .* call its own forward",
    "POLY": r"cannot run on token ids alone \(.*task_ids should not be None.* call its own forward",
}
FAST = {"ADAPTION_PROMPT", "LORA", "LILY", "POLY", "SHADOW", "PREFIX_TUNING"}
MARKED = some_slow(METHODS, FAST, every=3)

ROWS = [([3, 4, 5, 6], [7, 8, 9]), ([3, 4, 5, 6], [8, 9]), ([9, 10], [11, 12, 13])]


@dataclasses.dataclass
class Output:
    """What `packed_logprobs` reads of an output."""

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int]


OUTPUTS = [Output(f"r{n}", *row) for n, row in enumerate(ROWS)]


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


@pytest.mark.filterwarnings("ignore")  # What a method warns of when its adapter is made.
@pytest.mark.parametrize("method", MARKED)
def test_an_adapter_is_packed_or_refused_in_a_sentence(method, tmp_path):
    model = adapted(method, tmp_path)
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


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}]
)
def test_each_output_is_scored_by_its_adapter_and_gives_gradients_to_it_alone(
    settings, is_checkpointed
):
    model = with_named_adapters("llama", **settings)
    if is_checkpointed:
        model.train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [p for n, p in model.named_parameters() if "lora_" in n or "modules_to_save" in n]
    names = [None, "two", "three", "two", "one"]
    rows = [*ROWS, *ROWS[:2]]
    outputs = [
        GenerationOutput(f"r{n}", prompt, completion, adapter=name)
        for n, ((prompt, completion), name) in enumerate(zip(rows, names, strict=True))
    ]
    for parameter in trained:
        parameter.requires_grad_(True)
    scored = packed_logprobs(model, outputs)
    packed = torch.cat(scored)
    own = gradients_of(model, packed)
    model.zero_grad()
    weights = torch.linspace(1, 2, len(packed)).split([len(scores) for scores in scored])
    for output, scores, weight in zip(outputs, scored, weights, strict=True):
        model.set_adapter(output.adapter or "one")
        for parameter in trained:
            parameter.requires_grad_(True)
        ids = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(output.prompt_ids) - 1 : -1]
        labels = ids[0, len(output.prompt_ids) :, None]
        expected = logits.log_softmax(-1).gather(1, labels)[:, 0]
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        (expected * weight).sum().backward()
    right = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == right.keys()
    for name, gradient in right.items():
        assert (own[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-6, name


def test_an_output_of_an_adapter_that_the_model_has_not_is_refused():
    output = GenerationOutput("r0", [3, 4], [5], adapter="four")
    with pytest.raises(ConfigurationError, match=r"'four' .* not in the model, which has one, thr"):
        packed_logprobs(with_named_adapters("llama"), [output])


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
    model = Deaf(tiny_model("llama"), num_calls)
    with pytest.raises(ConfigurationError, match=rf"under Deaf, which .*{words}; call its own"):
        packed_logprobs(model, OUTPUTS)
