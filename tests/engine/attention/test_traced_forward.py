"""A traced forward does what the model's own forward does, or there is none."""

from dataclasses import replace

import pytest
import torch
from nightly import slow_after
from tiny import tiny_model
from torch import fx

from cb_rollout.compat import inductor
from cb_rollout.compat.transformers import text_token_ids
from cb_rollout.engine.attention.cpu.backend import TRACING, replace_linear_layers
from cb_rollout.engine.attention.cpu.linear import linear
from cb_rollout.engine.attention.traced_forward import (
    Trace,
    Traceable,
    UntraceableError,
    attend_to_new_token,
)
from cb_rollout.engine.model.check import check_model
from cb_rollout.engine.model.runner import ModelRunner

TRACEABLE = ["qwen3", "llama", "gpt2", "mistral", "qwen3_moe", "gpt_oss"]


def runner_of(model):
    runner = ModelRunner(model.eval(), None)
    runner.use(check_model(runner).execution)
    return runner


def traceable(runner):
    return Traceable(runner.decode, runner.attention_backend.cache, text_token_ids(runner.model))


def trace_of(runner, tracing=TRACING, **settings):
    return Trace(traceable(runner), tracing, **settings)


def both(runner, traced, num_rows):
    """Logits of the model itself, and by its trace."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(runner.model.config.vocab_size, (num_rows, 1), generator=generator)
    positions = torch.arange(num_rows)[:, None] % 8 + 5
    with torch.no_grad():
        own = traceable(runner).run(attend_to_new_token, tokens, positions)
    return own, traced(tokens, positions, attend_to_new_token)


@pytest.mark.fast_cases("llama")
@pytest.mark.parametrize("family", slow_after(2, TRACEABLE))
def test_a_trace_agrees_for_any_number_of_rows(family):
    runner = runner_of(tiny_model(family))
    traced = trace_of(runner)
    for num_rows in (1, 2, 3, 5, 64, 65, 200):
        torch.testing.assert_close(*both(runner, traced, num_rows), atol=2e-5, rtol=1e-5)


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("vocab_size", [16, 2, 1])
def test_a_small_vocabulary_has_a_trace(vocab_size):
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    runner = runner_of(tiny_model("qwen3", vocab_size, num_hidden_layers=1, **special))
    torch.testing.assert_close(*both(runner, trace_of(runner), 3), atol=2e-5, rtol=1e-5)


def test_a_model_of_few_positions_has_a_trace():
    runner = runner_of(tiny_model("gpt2", n_positions=16))
    torch.testing.assert_close(*both(runner, trace_of(runner), 3), atol=2e-5, rtol=1e-5)


def test_a_trace_in_bfloat16_rounds_as_the_model():
    runner = runner_of(tiny_model("qwen3").bfloat16())
    traced = trace_of(runner)
    for num_rows in (1, 5, 65):
        own, got = both(runner, traced, num_rows)
        assert (own - got).abs().max() <= 2**-8 * own.abs().max()


def test_linear_layers_with_biases_have_a_trace():
    runner = runner_of(tiny_model("llama", attention_bias=True, mlp_bias=True))
    with torch.no_grad():
        for name, parameter in runner.model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    traced = trace_of(runner)
    for num_rows in (1, 2, 5, 64):
        torch.testing.assert_close(*both(runner, traced, num_rows), atol=2e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", TRACEABLE)
def test_a_compiled_trace_agrees_for_any_number_of_rows(family):
    runner = runner_of(tiny_model(family))
    traced = trace_of(runner, is_compiled=True)
    for num_rows in (1, 2, 3, 5, 64, 65, 200):
        torch.testing.assert_close(*both(runner, traced, num_rows), atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_layers_share_the_regions_that_are_compiled(monkeypatch):
    compiled = []

    def run_by_torch(graph):
        compiled.append(graph)
        module = fx.GraphModule({}, graph)
        return lambda *inputs: module(*inputs)

    monkeypatch.setattr(inductor, "compile_outputs", run_by_torch)
    nums_compiled, nums_left = [], []
    for num_layers in (3, 5):
        runner = runner_of(tiny_model("qwen3", num_hidden_layers=num_layers).bfloat16())
        traced = trace_of(runner, is_compiled=True)
        own, got = both(runner, traced, 7)
        assert (own - got).abs().max() <= 2**-8 * own.abs().max()
        nums_compiled.append(len(compiled))
        nums_left.append(len([n for n in traced.graph.nodes if n.op != "placeholder"]))
    assert nums_compiled[1] == 2 * nums_compiled[0] <= 14
    # Of a layer; uncompiled it has 60.
    assert (nums_left[1] - nums_left[0]) / 2 < 30


def test_an_untraceable_error_names_what_the_compiler_raised(monkeypatch):
    def fails(*_, options, **__):
        assert options["config_patches"]["emulate_precision_casts"] is True
        raise RuntimeError("internal compiler error")

    monkeypatch.setattr(inductor, "standalone_compile", fails)
    runner = runner_of(tiny_model("llama"))
    for tracing in (replace(TRACING, simplify=None), TRACING):
        with pytest.raises(UntraceableError, match=r"it does not compile: .*internal compiler"):
            trace_of(runner, tracing, is_compiled=True)


def test_a_trace_sees_weights_that_change_in_place_or_by_their_data():
    runner = runner_of(tiny_model("qwen3"))
    traced = trace_of(runner)
    before = both(runner, traced, 4)[1]
    with torch.no_grad():
        for index, parameter in enumerate(runner.model.parameters()):
            if index % 2:
                parameter.mul_(1.1)
            else:
                parameter.data = parameter.data * 0.9
    own, after = both(runner, traced, 4)
    torch.testing.assert_close(own, after, atol=2e-5, rtol=1e-5)
    assert not torch.allclose(before, after, atol=1e-3)


def test_no_module_runs_in_a_trace():
    runner = runner_of(tiny_model("llama"))
    traced = trace_of(runner)
    runner.model.model.layers[0].forward = None
    with pytest.raises(TypeError):
        both(runner, traced, 2)
    tokens = torch.tensor([[3], [4]])
    assert traced(tokens, tokens, attend_to_new_token).isfinite().all()


def asks_for_a_number(module, args, output):
    return output if output.sum().item() > 0 else output * 1.0


def depends_on_rows(module, args, output):
    return output * 2 if output.shape[0] > 7 else output


def scales_by_rows(module, args, output):
    return output * len(output.tolist())


@pytest.mark.fast_cases("asks_for_a_number")
@pytest.mark.parametrize("hook", [asks_for_a_number, depends_on_rows, scales_by_rows])
def test_a_forward_that_is_not_the_same_every_time_has_no_trace(hook, caplog):
    runner = runner_of(tiny_model("llama"))
    runner.model.model.layers[0].mlp.register_forward_hook(hook)
    with pytest.raises(UntraceableError):
        trace_of(runner)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.slow
def test_unused_results_of_a_forward_are_left_out():
    runner = runner_of(tiny_model("llama"))
    unused = torch.nn.Parameter(torch.ones(3))

    def wastes(module, args, output):
        _ = unused * 2
        return output

    runner.model.model.layers[0].mlp.register_forward_hook(wastes)
    traced = trace_of(runner)
    torch.testing.assert_close(*both(runner, traced, 4), atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_one_bias_for_all_outputs_is_added_to_each():
    runner = runner_of(tiny_model("llama", mlp_bias=True))
    for layer in runner.model.model.layers:
        layer.mlp.up_proj.bias = torch.nn.Parameter(torch.full((1,), 0.5))
    traced = trace_of(runner)
    torch.testing.assert_close(*both(runner, traced, 4), atol=2e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_trace_reshapes_each_tensor_once():
    traced = trace_of(runner_of(tiny_model("llama")))
    reshapes = [n for n in traced.graph.nodes if n.target == "reshape"]
    assert reshapes
    assert not [node for node in reshapes if node.args[0] in reshapes]
    assert len({str(node.args) for node in reshapes}) == len(reshapes)


def test_a_bias_for_each_row_is_not_taken_for_a_linear_layers_bias():
    runner = runner_of(tiny_model("llama"))
    weight = torch.nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def adds(module, args, output):
        rows = output.reshape(-1, 64)
        return torch.addmm(rows, rows, weight.t()).view_as(output)

    runner.model.model.layers[0].mlp.register_forward_hook(adds)
    traced = trace_of(runner)
    for num_rows in (1, 5, 64):
        torch.testing.assert_close(*both(runner, traced, num_rows), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "num_layers", "num_products"),
    slow_after(1, [("qwen3", 15, 9), ("llama", 15, 9), ("gpt2", 1, 1)]),
)
def test_linear_layers_are_found_and_those_of_the_same_rows_joined(
    family, num_layers, num_products
):
    traced = trace_of(runner_of(tiny_model(family)))
    found = [node for node in traced.graph.nodes if node.target is linear]
    assert len(found) == num_products
    assert sum(len(node.args[1]) for node in found) == num_layers


def test_a_scaled_product_is_not_taken_for_a_linear_layer():
    def scaled(bias, rows, weight):
        return torch.addmm(bias, rows[:, 0], weight.t(), beta=0.5)

    examples = torch.ones(5), torch.ones(3, 1, 8), torch.ones(5, 8)
    module, _ = inductor.trace_graph(scaled, *examples)
    replace_linear_layers(module.graph, [])
    module.recompile()
    torch.testing.assert_close(module(*examples), scaled(*examples))
