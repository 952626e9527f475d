"""`packed_logprobs` are those of the model's plain forward, and so are their gradients."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Thread

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_attention import varlen_attn, varlen_attn_of_grouped_heads
from prefix_trees import random_tree_rows
from tiny import SMALL, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from cb_rollout import (
    ConfigurationError,
    GenerationOutput,
    InvalidRequestError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
    packed_logprobs,
)
from cb_rollout.compat import torch as torch_compat
from cb_rollout.packing import batch as batch_module
from cb_rollout.packing import forward as forward_module
from cb_rollout.packing import logprobs as logprobs_module

VOCABULARY = 64
TEMPERATURE = 0.7

# Shorter than the longest row, so that some tokens see a part of their prompt, or none of it.
WINDOW = 6

PACKED = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    | dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "deepseek_v3": {},
    "qwen3_moe": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64, "dropout": 0.0, "head_dim": None},
}
PADDED = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"head_dim": None, "num_key_value_heads": None},
}
FORKED = {"lfm2": {"layer_types": ["conv", "full_attention"]}}
FAMILIES = PACKED | PADDED | FORKED
LAYOUTS = {
    **dict.fromkeys(PACKED, "shared_prefixes"),
    **dict.fromkeys(PADDED, "padded"),
    **dict.fromkeys(FORKED, "forked_states"),
}


@dataclass
class Output:
    """What `packed_logprobs` reads of an output."""

    request_id: str
    prompt_ids: Sequence[int]
    generated_tokens: Sequence[int]


def random_outputs(num_groups=3, size=3, seed=0):
    """Groups of equal prompts; some completions are empty."""
    rng = random.Random(seed)

    def tokens(least, most):
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(least, most))]

    groups = [(tokens(3, 9), [tokens(0, 9) for _ in range(size)]) for _ in range(num_groups)]
    pairs = [(prompt, completion) for prompt, group in groups for completion in group]
    # One more, whose length no seed decides.
    pairs.append((pairs[0][0], []))
    return [Output(f"r{i}", *pair) for i, pair in enumerate(pairs)]


def tree_outputs(seed):
    """Turns and forks of two conversations, with temperatures of their own."""
    rows = random_tree_rows(random.Random(seed), VOCABULARY)
    return [Output(f"r{i}", *row) for i, row in enumerate(rows)]


def num_beginnings(outputs):
    """The tokens that must be computed: as many as the scored tokens have different histories."""
    scored = [o for o in outputs if o.generated_tokens]
    sequences = [(*o.prompt_ids, *o.generated_tokens[:-1]) for o in scored]
    return len({ids[:n] for ids in sequences for n in range(1, len(ids) + 1)})


def a_model(family):
    settings = FAMILIES[family]
    if family in ("gemma2", "opt", "mamba"):
        given = {**SMALL, "vocab_size": VOCABULARY, **settings}
        given = {name: value for name, value in given.items() if value is not None}
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **given)
        return AutoModelForCausalLM.from_config(config).train()
    return tiny_model(family, vocab_size=VOCABULARY, **settings).train()


def plain(model, outputs, temperature=TEMPERATURE):
    """One forward each, by the definition."""
    found = []
    for output in outputs:
        ids = torch.tensor([[*output.prompt_ids, *output.generated_tokens]])
        first = len(output.prompt_ids)
        logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1]
        logprobs = (logits.float() / temperature).log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, first:, None])[:, 0])
    return found


def gradients_of(model, logprobs):
    """Gradients of a sum in which each token has a weight of its own."""
    total = sum((values * torch.linspace(1, 2, len(values))).sum() for values in logprobs)
    model.zero_grad()
    total.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_as_plain(model, outputs):
    packed = packed_logprobs(model, outputs, temperature=TEMPERATURE)
    own = gradients_of(model, packed)
    expected = plain(model, outputs)
    other = gradients_of(model, expected)
    assert [len(values) for values in packed] == [len(o.generated_tokens) for o in outputs]
    for values, right in zip(packed, expected, strict=True):
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)
    # Experts that no token is sent to have a gradient of zero, or none.
    for name in own.keys() | other.keys():
        mine = own.get(name, torch.zeros(()))
        right = other.get(name, torch.zeros(()))
        assert (mine - right).norm() <= 1e-5 * right.norm() + 1e-6, name


def layouts_used(monkeypatch):
    """The layouts of all batches from now on."""
    used, pack = [], batch_module.pack

    def watched(rows, numbers, layout, *rest):
        used.append(layout.value)
        return pack(rows, numbers, layout, *rest)

    monkeypatch.setattr(logprobs_module, "pack", watched)
    return used


@pytest.mark.parametrize("varlen", [varlen_attn, varlen_attn_of_grouped_heads])
def test_prompts_are_shared_where_pytorchs_own_kernel_attends(varlen, monkeypatch):
    monkeypatch.setattr(torch_compat, "varlen_attn", varlen)
    monkeypatch.setattr(torch_compat, "has_varlen", lambda *_: True)
    used = layouts_used(monkeypatch)
    model = a_model("qwen3")
    for outputs in (random_outputs(), tree_outputs(0), tree_outputs(1)):
        assert_as_plain(model, outputs)
    assert set(used) == {"shared_prefixes"}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_scores_and_gradients_of_its_plain_forward(monkeypatch, family):
    used = layouts_used(monkeypatch)
    model, outputs = a_model(family), random_outputs()
    longest = max(len(o.prompt_ids) + len(o.generated_tokens) for o in outputs)
    assert longest > WINDOW + 2
    assert_as_plain(model, outputs)
    assert used[-1] == LAYOUTS[family]
    # A layout is looked for once.
    num_looked = len(used)
    packed_logprobs(model, outputs[:2])
    assert len(used) == num_looked + 1
    assert model.training


@pytest.mark.fast_cases("mistral")
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3", "qwen3_moe"])
def test_what_the_turns_and_forks_of_conversations_share_is_computed_once(family, monkeypatch):
    used, sizes, model = layouts_used(monkeypatch), [], a_model(family)
    packed_logprobs(model, random_outputs())
    model.get_input_embeddings().register_forward_hook(
        lambda *of_call: sizes.append(of_call[2].shape[1])
    )
    for seed in range(6):
        outputs = tree_outputs(seed)
        packed_logprobs(model, outputs)
        assert sizes.pop() == num_beginnings(outputs) < sum(len(o.prompt_ids) for o in outputs)
        assert_as_plain(model, outputs)
    assert set(used) == {"shared_prefixes"}


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_conversations_of_a_recurrent_model_share_prompts_or_nothing(family, monkeypatch):
    used, model = layouts_used(monkeypatch), a_model(family)
    for seed in range(2):
        assert_as_plain(model, tree_outputs(seed))
    assert used[-1] == LAYOUTS[family]


@pytest.mark.fast_cases("llama")
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek_v3", "qwen3_moe"])
def test_in_bfloat16_a_tree_is_as_near_to_float32_as_rows_alone(family):
    model = a_model(family).bfloat16()
    exact = copy.deepcopy(model).float()
    for seed in range(3):
        outputs = tree_outputs(seed)
        found = []
        for scored in (
            packed_logprobs(model, outputs, temperature=TEMPERATURE),
            plain(model, outputs),
            plain(exact, outputs),
        ):
            scores = torch.cat([values.detach() for values in scored])
            found.append((scores, gradients_of(exact if len(found) == 2 else model, scored)))
        (packed, own), (alone, others), (right, expected) = found
        # The rounding of 16 bits differs between any two orders of sums.
        assert (packed - right).norm() <= 1.5 * (alone - right).norm() + 1e-3
        of_packed, of_alone = (
            sum(float((grads[n].float() - g).norm()) ** 2 for n, g in expected.items()) ** 0.5
            for grads in (own, others)
        )
        assert of_packed <= 1.5 * of_alone + 1e-3


def test_a_shared_token_counts_for_each_row_at_its_own_temperature(model):
    prompt, tokens = [3, 4, 5], [6, 7, 8, 9]
    outputs = [
        Output("a", prompt, tokens),
        Output("b", prompt, tokens),
        Output("c", [3, 4], [5, 6]),
    ]
    outputs[1].temperature = 0.5
    found = packed_logprobs(model, outputs)
    expected = [
        plain(model, [output], temperature)[0]
        for output, temperature in zip(outputs, (1.0, 0.5, 1.0), strict=True)
    ]
    own, other = gradients_of(model, found), gradients_of(model, expected)
    for values, right in zip(found, expected, strict=True):
        torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)
    for name, right in other.items():
        assert (own[name] - right).norm() <= 1e-5 * right.norm() + 1e-6, name


@pytest.fixture(scope="module")
def model():
    return a_model("qwen3")


@pytest.fixture(autouse=True)
def fresh_layouts():
    logprobs_module._LAYOUTS.clear()


def test_each_prompt_is_computed_once(model):
    outputs = random_outputs()
    packed_logprobs(model, outputs)
    seen = []
    layer = model.model.layers[0]
    handle = layer.register_forward_hook(lambda *args: seen.append(tuple(args[2].shape[:2])))
    packed_logprobs(model, outputs)
    handle.remove()
    assert seen == [(1, num_beginnings(outputs))]


def test_logits_exist_for_a_chunk_at_a_time(model, monkeypatch):
    monkeypatch.setattr(logprobs_module, "CHUNK_TOKENS", 5)
    sizes = []
    handle = model.lm_head.register_forward_hook(lambda *args: sizes.append(args[2].shape[1]))
    outputs = random_outputs()
    assert_as_plain(model, outputs)
    handle.remove()
    assert sizes.count(5) > 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_are_computed_again_over_packed_tokens(use_reentrant):
    model = a_model("qwen3")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    # Under reentrant checkpointing the first layer's input has to have a gradient.
    model.enable_input_require_grads()
    calls = []
    # The layer's own hooks stay outside what is checkpointed.
    inside = model.model.layers[0].self_attn.q_proj
    inside.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    outputs = random_outputs()
    packed = packed_logprobs(model, outputs, temperature=TEMPERATURE)
    num_calls = len(calls)
    own = gradients_of(model, packed)
    assert len(calls) == num_calls + 1, "nothing was computed again"
    model.gradient_checkpointing_disable()
    other = gradients_of(model, plain(model, outputs))
    for name, gradient in own.items():
        assert (gradient - other[name]).norm() <= 1e-5 * other[name].norm() + 1e-6, name


def test_an_adapter_has_its_gradients():
    model = get_peft_model(
        a_model("qwen3"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert_as_plain(model, random_outputs())
    with model.disable_adapter(), torch.no_grad():
        outputs = random_outputs()
        for values, right in zip(
            packed_logprobs(model, outputs), plain(model, outputs, 1.0), strict=True
        ):
            torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5)


def test_a_second_thread_waits_for_the_first(model):
    outputs, found = random_outputs(), []
    packed_logprobs(model, outputs)
    second = Thread(target=lambda: found.append(packed_logprobs(model, outputs)))

    def amid(*_):
        if second.ident is None:
            second.start()
            second.join(0.2)

    handle = model.model.layers[0].register_forward_pre_hook(amid)
    first = packed_logprobs(model, outputs)
    handle.remove()
    second.join()
    assert "forward" not in vars(model)
    for values, others in zip(first, *found, strict=True):
        torch.testing.assert_close(values, others, rtol=1e-5, atol=1e-5)


def test_a_rollout_is_scored_over_the_ids_that_truncation_kept(model):
    """And the dict of a rollout is taken as its outputs are."""
    params = SamplingParams(top_k=4, temperature=0.7, max_new_tokens=9)
    prompts = [[3, 4, 5, 6]] * 3 + [[7, 8]]
    with RolloutGenerator(model, RolloutConfig(seed=0, sampling_mask="replay")) as generator:
        outputs = generator.generate_batch(prompts, sampling_params=params)
        # One row of the whole vocabulary beside the masked ones.
        whole = SamplingParams(max_new_tokens=5)
        outputs |= generator.generate_batch([[9, 10]], sampling_params=whole)
    packed = packed_logprobs(model, outputs)
    for values, output in zip(packed, outputs.values(), strict=True):
        assert values.tolist() == pytest.approx(output.logprobs, abs=1e-5)
    (expected,) = plain(model, [*outputs.values()][:1], temperature=0.7)
    assert (packed[0] - expected).max() > 0.1


def test_without_gradients_there_is_no_graph(model):
    with torch.no_grad():
        values = packed_logprobs(model, random_outputs())
    assert not any(v.requires_grad for v in values)


def test_outputs_without_a_token_have_no_log_probability(model):
    values = packed_logprobs(model, [Output("a", [3], []), Output("b", [4, 5], [])])
    assert [v.shape for v in values] == [(0,), (0,)]
    assert packed_logprobs(model, []) == []


def test_outputs_carry_the_temperature_that_they_were_sampled_with(model):
    sampled = SamplingParams(temperature=0.8, max_new_tokens=6, ignore_eos=True)
    greedy = [
        SamplingParams(temperature=0.8, do_sample=False, max_new_tokens=6),
        SamplingParams(temperature=0, max_new_tokens=6),
    ]
    with RolloutGenerator(model) as generator:
        outputs = [
            output
            for params in (sampled, *greedy)
            for output in generator.generate_batch([[3, 4, 5]], sampling_params=params).values()
        ]
    assert [output.temperature for output in outputs] == [0.8, 1.0, 1.0]
    assert GenerationOutput("by hand").temperature == 1.0
    for values, output in zip(packed_logprobs(model, outputs), outputs, strict=True):
        torch.testing.assert_close(values, torch.tensor(output.logprobs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_temperature_that_divides_nothing_is_refused(model, temperature):
    with pytest.raises(ConfigurationError, match="is not a finite number above 0"):
        packed_logprobs(model, random_outputs(), temperature=temperature)


def test_a_low_temperature_multiplies_rounding_and_is_no_reason_to_refuse(model):
    outputs, temperature = random_outputs(), 1e-4
    packed = packed_logprobs(model, outputs, temperature=temperature)
    for values, right in zip(packed, plain(model, outputs, temperature), strict=True):
        torch.testing.assert_close(values, right, rtol=1e-5, atol=1e-5 / temperature)


def without_a_head():
    return a_model("qwen3").model


def encoder_decoder():
    return T5ForConditionalGeneration(
        T5Config(d_model=8, d_ff=8, d_kv=8, num_layers=1, num_heads=1, vocab_size=VOCABULARY)
    )


def not_loaded():
    return a_model("qwen3").to("meta")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (without_a_head, "has no language-model head"),
        (encoder_decoder, "is an encoder-decoder"),
        (not_loaded, "on the meta device"),
    ],
)
def test_a_model_that_has_no_scores_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        packed_logprobs(make(), random_outputs())


def test_an_output_without_a_prompt_is_named(model):
    outputs = [*random_outputs(), Output("the one", [], [3])]
    with pytest.raises(InvalidRequestError, match="the one has an empty prompt"):
        packed_logprobs(model, outputs)


@pytest.mark.parametrize(
    ("prompt", "completion", "said"),
    [
        ([True, False], [3], "True at position 0 is a boolean"),
        ([5, 6], [3, torch.tensor(True)], "True at position 1 is a boolean"),
        (torch.tensor([True]), [3], "True at position 0 is a boolean"),
        ([5.0], [3], "5.0 at position 0 is a float"),
        ([5], torch.tensor([3.0]), "3.0 at position 0 is a float"),
    ],
)
def test_what_is_no_token_id_is_not_scored(model, prompt, completion, said):
    output = GenerationOutput("mine", prompt, completion, [-1.0] * len(completion))
    with pytest.raises(InvalidRequestError, match=f"mine does not hold token ids .{said}"):
        packed_logprobs(model, [output])


@pytest.mark.parametrize(("prompt", "completion"), [([-1], [3]), ([3], [3, VOCABULARY, 4])])
def test_an_output_of_another_vocabulary_is_named(model, prompt, completion):
    outputs = (o for o in [*random_outputs(), Output("the one", prompt, completion)])
    with pytest.raises(InvalidRequestError, match=r"the one holds token id (-1|64), outside"):
        packed_logprobs(model, outputs)


def test_a_model_whose_packed_forward_lies_runs_padded_and_then_not_at_all(monkeypatch, model):
    used = layouts_used(monkeypatch)
    attention = forward_module.PackedAttention

    class Lying(attention):
        def __call__(self, *arguments, **named):
            output, weights = super().__call__(*arguments, **named)
            return output.roll(1, dims=1), weights

    monkeypatch.setattr(forward_module, "PackedAttention", Lying)
    assert_as_plain(model, random_outputs())
    assert used == ["shared_prefixes", "padded", "padded"]
    logprobs_module._LAYOUTS.clear()
    monkeypatch.setattr(logprobs_module, "_plain", lambda _, row, __: torch.ones(len(row[1])))
    with pytest.raises(ConfigurationError, match="Qwen3ForCausalLM computes different log-prob"):
        packed_logprobs(model, random_outputs())


def test_one_output_alone_is_no_proof_for_several():
    model = a_model("lfm2")
    outputs = random_outputs()
    alone = next(output for output in outputs if len(output.generated_tokens) > 2)
    assert_as_plain(model, [alone])
    assert_as_plain(model, outputs)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_a_config_that_asks_for_router_logits_is_rolled_out_and_scored(family):
    model = tiny_model(family)
    model.config.output_router_logits = True
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with RolloutGenerator(model) as generator:
        outputs = generator.generate_batch([[3, 4, 5], [3, 4, 5, 6, 7]], sampling_params=params)
    packed = packed_logprobs(model, outputs.values())
    for values, output in zip(packed, outputs.values(), strict=True):
        torch.testing.assert_close(values, torch.tensor(output.logprobs), rtol=1e-5, atol=1e-5)
