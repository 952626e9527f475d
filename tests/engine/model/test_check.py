from dataclasses import replace
from functools import wraps

import pytest
import torch
from plain_attention import varlen_attn, varlen_attn_of_grouped_heads
from tiny import tiny_model

from cb_rollout import ConfigurationError, RolloutGenerator
from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.attention.packed import PackedAttention
from cb_rollout.engine.model import runner as model_runner
from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner


def batch_layout(model):
    return check_model(ModelRunner(model, None)).execution.batch_layout


class Altered:
    """A tiny qwen3 whose inner model gets `change(arguments)`."""

    def __init__(self, change):
        self.model = tiny_model("qwen3")
        inner, forward = self.model.model, self.model.model.forward

        def altered(*args, **kwargs):
            return forward(*args, **change(kwargs))

        inner.forward = altered


def without_positions(arguments):
    return arguments | {"position_ids": None}


def with_one_row_only(arguments):
    if arguments["input_ids"].shape[0] > 1:
        raise ValueError("one row at a time")
    return without_positions(arguments)


def with_late_keys(arguments):
    # transformers 5.24 renamed it.
    cache = arguments["cache"] if "cache" in arguments else arguments["past_key_values"]
    if cache is not None and cache.get_seq_length():
        arguments["input_ids"] = arguments["input_ids"].roll(1) * 0 + 5
    return arguments


def without_mask(module, args, arguments):
    module.is_causal = False
    return args, arguments | {"attention_mask": None}


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gpt_oss", "deepseek_v3"])
def test_a_model_whose_attention_can_be_replaced_has_its_prompts_packed(family):
    assert batch_layout(tiny_model(family)) is BatchLayout.PACKED


@pytest.mark.parametrize("varlen", [varlen_attn, varlen_attn_of_grouped_heads])
def test_a_model_is_packed_where_pytorchs_own_kernel_attends(varlen, monkeypatch):
    called = []
    counted = wraps(varlen)(lambda *args, **named: called.append(1) or varlen(*args, **named))
    monkeypatch.setattr(torch_compat, "varlen_attn", counted)
    monkeypatch.setattr(torch_compat, "has_varlen", lambda *_: True)
    assert batch_layout(tiny_model("qwen3")) is BatchLayout.PACKED
    assert called


@pytest.mark.parametrize("family", ["bloom", "lfm2"])
def test_a_model_with_biases_of_its_own_or_recurrent_layers_has_its_rows_padded(family):
    assert batch_layout(tiny_model(family)) is BatchLayout.PADDED


@pytest.mark.parametrize(
    "wrong",
    [
        lambda s: s._replace(key_start=max(0, s.key_start - 1)),
        lambda s: s._replace(prefix=tuple(range(len(own)) for own in s.prefix)),
        lambda s: s._replace(prefix=tuple(own[:-1] for own in s.prefix)),
        lambda s: s._replace(prefix=()),
    ],
    ids=["own keys", "another row's history", "a key too few", "no history"],
)
def test_a_wrong_range_of_keys_is_seen(wrong, monkeypatch):
    def attention(segments, device, **named):
        return PackedAttention(list(map(wrong, segments)), device, **named)

    monkeypatch.setattr(model_runner, "PackedAttention", attention)
    assert batch_layout(tiny_model("llama")) is BatchLayout.PADDED


def test_wrong_positions_in_a_packed_row_are_seen():
    def in_a_row(arguments):
        ids, positions = arguments["input_ids"], arguments["position_ids"]
        if ids.shape[0] == 1 and positions is not None:
            arguments["position_ids"] = positions[:, :1] + torch.arange(ids.shape[1])
        return arguments

    assert batch_layout(Altered(in_a_row).model) is BatchLayout.PADDED


def test_a_layer_that_hides_keys_from_its_attention_function_is_not_packed():
    """Its choice would leave out no key of a row as short as those that are compared."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(with_a_choice_of_keys, with_kwargs=True)
    assert batch_layout(model) is BatchLayout.PADDED


def with_a_choice_of_keys(module, args, arguments):
    mask, num_tokens = arguments["attention_mask"], arguments["hidden_states"].shape[1]
    if mask is not None:
        arguments["attention_mask"] = mask & torch.ones(num_tokens, 1, dtype=torch.bool)
    return args, arguments


def test_a_model_that_takes_columns_for_positions_runs_rows_of_one_length_together():
    assert batch_layout(Altered(without_positions).model) is BatchLayout.EQUAL_LENGTHS


def test_a_model_that_raises_for_many_rows_runs_single_rows():
    assert batch_layout(Altered(with_one_row_only).model) is BatchLayout.SINGLE_ROWS


def test_a_model_that_computes_otherwise_with_a_cache_is_refused_with_the_difference():
    with pytest.raises(
        ConfigurationError, match=r"Qwen3ForCausalLM .*off its plain forward by \S+ nats"
    ):
        RolloutGenerator(Altered(with_late_keys).model)


@pytest.mark.filterwarnings("ignore")  # torch's own, of a function that many still call
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantised_activations_are_named_as_the_cause(family):
    plain = tiny_model(family)
    model = torch.ao.quantization.quantize_dynamic(plain, {torch.nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ConfigurationError, match=r"depend on what else.*quantize_dynamic") as told:
        RolloutGenerator(model)
    assert "is_decoder" not in str(told.value)


def test_is_decoder_is_advised_only_for_a_model_that_looks_ahead():
    with pytest.raises(ConfigurationError, match=r"own rounding of \S+\. Use model\.generate"):
        RolloutGenerator(Altered(with_late_keys).model)
    ahead = tiny_model("llama")
    for layer in ahead.model.layers:
        layer.self_attn.register_forward_pre_hook(without_mask, with_kwargs=True)
    with pytest.raises(ConfigurationError, match="looks ahead: set is_decoder=True"):
        RolloutGenerator(ahead)


def test_a_model_that_draws_its_outputs_at_random_is_said_to():
    def noisy(module, args, output):
        return output + torch.randn_like(output)

    model = tiny_model("llama")
    model.lm_head.register_forward_hook(noisy)
    with pytest.raises(ConfigurationError, match="Two forwards of the same tokens differ"):
        RolloutGenerator(model)


def test_a_model_without_one_table_of_token_ids_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(model, "get_input_embeddings", torch.nn.Identity)
    with pytest.raises(ConfigurationError, match="embeds its inputs with Identity, not with one"):
        RolloutGenerator(model)


def test_a_model_that_fails_on_token_ids_is_refused_with_its_error():
    def failing(arguments):
        raise RuntimeError("where is the image?")

    with pytest.raises(ConfigurationError, match=r"on token ids alone .*where is the image\?"):
        RolloutGenerator(Altered(failing).model)


def test_running_out_of_memory_is_not_a_fault_of_the_model():
    def exhausted(arguments):
        raise torch.OutOfMemoryError("2 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        RolloutGenerator(Altered(exhausted).model)


def test_diverged_weights_are_not_a_fault_of_the_model():
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert batch_layout(model) is BatchLayout.PADDED


def test_a_half_precision_model_passes():
    model = tiny_model("qwen3").bfloat16()
    assert batch_layout(model) is BatchLayout.PACKED


def test_a_check_changes_nothing_on_the_model():
    model = tiny_model("qwen3").train()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check_model(ModelRunner(model, None))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_float32_products_that_round_to_tf32_are_no_reason_to_run_rows_alone(
    monkeypatch,
):
    model = tiny_model("llama")
    linear = torch.nn.functional.linear

    def rounded(states, weight, bias=None):
        # Rounds only beside other rows, so that a padded batch differs from a row alone.
        is_alone = states.shape[0] == 1
        return linear(states if is_alone else states.half().float(), weight, bias)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data *= 6
    monkeypatch.setattr(torch.nn.functional, "linear", rounded)
    assert batch_layout(model) is BatchLayout.SINGLE_ROWS
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "tf32"
    try:
        assert batch_layout(model) is BatchLayout.PACKED
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.fast_cases("lfm2")
@pytest.mark.parametrize("family", ["qwen3", "lfm2", "rwkv"])
def test_the_check_of_a_model_leaves_the_runner_as_it_is(family):
    runner = ModelRunner(tiny_model(family), None)
    before = runner.execution
    checked = check_model(runner)
    assert runner.execution is before
    assert (runner.attention_backend, runner.batch_layout) == (None, BatchLayout.PADDED)
    runner.use(checked.execution)
    again = check_model(runner)
    assert runner.execution is checked.execution
    assert again.layout == checked.layout
    assert again.execution.batch_layout is checked.execution.batch_layout


def test_a_refused_model_leaves_the_runner_as_it_was():
    runner = ModelRunner(Altered(with_late_keys).model, None)
    before = runner.execution
    with pytest.raises(ConfigurationError, match="cannot run on a paged cache"):
        check_model(runner)
    assert runner.execution is before


def test_rows_are_computed_in_another_way_only_inside_the_context():
    runner = ModelRunner(tiny_model(), None)
    before = runner.execution
    with runner.using(replace(before, batch_layout=BatchLayout.SINGLE_ROWS)):
        assert runner.batch_layout is BatchLayout.SINGLE_ROWS
    assert runner.execution is before
