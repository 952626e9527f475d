"""Captured decode steps run the compiled forward, or the model's own and say why."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from fast_path import Playback, graphs_of, pretend_cuda
from tiny import plain_logprobs, tiny_model

from cb_rollout import (
    ContinuousBatchingManager,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.compat import inductor
from cb_rollout.engine.cuda_graphs import selection
from cb_rollout.engine.cuda_graphs.capture import CaptureFailedError
from cb_rollout.errors import ConfigurationError

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on a GPU")

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
ONE = {"use_cuda_graph": True, "max_requests_per_batch": 1}
SHORT = [9, 8, 7, 6]
PARAMS = SamplingParams(ignore_eos=True, max_new_tokens=3)


def generator_of(model, **settings):
    sizes = {"block_size": 8}
    return RolloutGenerator(model, RolloutConfig(seed=1, **sizes | settings))


def run_by_operators(graph):
    """In place of inductor: a list of operators, compiled at once."""
    return torch.fx.GraphModule({}, graph).forward


@pytest.fixture
def fast(monkeypatch):
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(selection, "COMPILED_DEVICES", {"cpu"})


@pytest.fixture
def quick(fast, monkeypatch):
    monkeypatch.setattr(inductor, "compile_graph", run_by_operators)


def assert_right(generator, model):
    """The tokens of a rollout, whose log-probabilities are those of the plain forward."""
    (output,) = generator.generate_batch([SHORT], sampling_params=PARAMS).values()
    expected = plain_logprobs(model, SHORT, output.generated_tokens)
    assert output.logprobs == pytest.approx(expected, abs=1e-5)
    return output.generated_tokens


def trace_of(generator):
    return generator.manager.engine.runner.attention_backend.traced_forward.trace


def test_a_graph_captures_the_compiled_forward_which_follows_weights_in_place(quick):
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, **ONE) as generator:
        assert "; forwards: compiled; CUDA graphs: on" in generator.manager.decode_path
        trace = trace_of(generator)
        assert_right(generator, model)
        # Captures the graph of short rows, whose keys are not cut.
        generator.manager.warmup()
        captured = Playback.num_captures
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.3)
        generator.sync_weights()
        assert_right(generator, model)
        assert trace_of(generator) is trace
        assert Playback.num_captures == captured


@pytest.mark.slow
def test_a_moved_weight_or_a_replaced_forward_is_compiled_anew_and_a_hook_runs_the_model(quick):
    model = tiny_model("qwen3", **SMALL)
    mlp, seen = model.model.layers[0].mlp, []
    with generator_of(model, **ONE) as generator:
        trace = trace_of(generator)
        mlp.forward = lambda states: 2 * type(mlp).forward(mlp, states)
        generator.sync_weights()
        assert_right(generator, model)
        assert trace_of(generator) not in (None, trace)
        hook = mlp.register_forward_hook(lambda *_: seen.append(1))
        generator.sync_weights()
        seen.clear()
        tokens = assert_right(generator, model)
        assert len(seen) >= len(tokens)
        assert "forwards: by the model, until compiled" in generator.manager.decode_path
        hook.remove()
        generator.sync_weights()
        assert_right(generator, model)
        assert "forwards: compiled" in generator.manager.decode_path


@pytest.fixture
def accelerator():
    """Its state is the process's, and refuses another precision than the first one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "is_first",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["after attach", "before attach"],
)
def test_a_model_that_accelerate_prepares_is_captured_once_and_gives_logits_in_its_dtype(
    is_first, quick, accelerator
):
    model, dtypes, seen = tiny_model("qwen3", **SMALL).bfloat16(), [], []
    if is_first:
        accelerator.prepare_model(model)
    read = SimpleNamespace(
        mixed_precision="bf16",
        process_index=0,
        num_processes=1,
        device=model.device,
        state=SimpleNamespace(),
    )
    config = RolloutConfig(seed=1, block_size=8, **ONE)
    with RolloutGenerator(model, config, accelerator=read) as generator:
        assert generator.manager.model is model
        trace, sampler = trace_of(generator), graphs_of(generator)._sampler
        sample = sampler.sample
        sampler.sample = lambda logits, lines: dtypes.append(logits.dtype) or sample(logits, lines)
        generator.manager.warmup()
        captured = Playback.num_captures
        if not is_first:
            accelerator.prepare_model(model)
        wrapped = vars(model)["forward"]
        generator.sync_weights()
        (output,) = generator.generate_batch([SHORT], sampling_params=PARAMS).values()
        assert (trace_of(generator), Playback.num_captures) == (trace, captured)
        assert vars(model)["forward"] is wrapped
        assert set(dtypes) == {torch.bfloat16}
        expected = plain_logprobs(model, SHORT, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=0.05)
        # A hook of the model itself is called, and a wrapper of another kind runs.
        model.register_forward_hook(lambda *_: seen.append("hook"))
        model.forward = lambda **given: seen.append("forward") or wrapped(**given)
        generator.sync_weights()
        generator.generate_batch([SHORT], sampling_params=PARAMS)
        assert set(seen) == {"hook", "forward"}


@pytest.mark.slow
def test_a_prepared_model_whose_trainer_is_not_given_runs_under_accelerates_autocast(accelerator):
    model = tiny_model("qwen3", **SMALL)
    manager = ContinuousBatchingManager(model, None, RolloutConfig())
    assert pages_of(manager) == {torch.float32}
    accelerator.prepare_model(model)
    manager.warmup()
    assert pages_of(manager) == {torch.bfloat16}


def pages_of(manager):
    """The dtypes of keys and values."""
    return {states.dtype for states in manager.engine.paged_model.layout.layers[0].per_token}


def fails(graph):
    raise RuntimeError("no compiler")


def computes_something_else(graph):
    module = torch.fx.GraphModule({}, graph)
    return lambda *inputs: module(*inputs).flip(-1)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (fails, r"it does not compile: RuntimeError: no compiler"),
        (computes_something_else, r"with 251 rows it computes something else"),
    ],
)
def test_what_does_not_compile_is_captured_as_the_model_computes_it(
    compiler, reason, fast, monkeypatch, caplog
):
    monkeypatch.setattr(inductor, "compile_graph", compiler)
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, **ONE) as generator:
        path = generator.manager.decode_path
        assert f"forwards: by the model, not compiled ({reason}" in path
        assert "; CUDA graphs: on" in path
        assert reason in caplog.text
        assert_right(generator, model)


def test_a_compiled_forward_that_cannot_be_captured_leaves_the_models_own(quick, monkeypatch):
    tried = []

    def capture(self, step, capture=Playback.__call__):
        tried.append(step)
        if len(tried) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(self, step)

    monkeypatch.setattr(Playback, "__call__", capture)
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, **ONE) as generator:
        path = generator.manager.decode_path
        assert "forwards: by the model, not compiled (it cannot be captured: " in path
        assert "CUDA graphs: on" in path
        assert_right(generator, model)


def test_one_line_says_that_a_compilation_begins_and_what_to_set(quick, caplog):
    with generator_of(tiny_model("qwen3", **SMALL), **ONE):
        said = [r for r in caplog.records if "compiling decode forwards now" in r.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]
    assert "use_default_compile_configs=False" in said[0].getMessage()


def test_a_trace_that_fails_in_a_captured_step_is_raised_and_not_replaced_inside_the_capture(
    quick, monkeypatch
):
    """What ran the model instead would be captured by a stream that CUDA has invalidated."""
    raised = []

    def capture(self, step, capture=Playback.__call__):
        try:
            return capture(self, step)
        except Exception as error:
            raised.append(str(error))
            raise

    def fails_at_last(graph):
        module = run_by_operators(graph)

        def run(tokens_B1, *rest):
            if tokens_B1.shape[0] == 1 and not tokens_B1.any():
                raise RuntimeError("no kernel image")
            return module(tokens_B1, *rest)

        return run

    monkeypatch.setattr(Playback, "__call__", capture)
    monkeypatch.setattr(inductor, "compile_graph", fails_at_last)
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, **ONE) as generator:
        path = generator.manager.decode_path
        assert raised == ["no kernel image"]
        assert "not compiled (it cannot be captured: RuntimeError: no kernel image" in path
        assert "CUDA graphs: on" in path
        assert_right(generator, model)


def test_after_a_capture_that_cuda_refused_no_other_is_tried(quick, monkeypatch, caplog):
    tried = []

    def refused(self, step):
        tried.append(step)
        raise CaptureFailedError("CUDA refused a capture (RuntimeError: illegal address)")

    monkeypatch.setattr(Playback, "__call__", refused)
    model = tiny_model("qwen3", **SMALL)
    with generator_of(model, max_requests_per_batch=1) as generator:
        path = generator.manager.decode_path
        assert (
            "CUDA graphs: off (cannot be had: CUDA refused a capture (RuntimeError: illegal address"
            in path
        )
        assert len(tried) == 1
        (warning,) = [r for r in caplog.records if "illegal address" in r.getMessage()]
        assert warning.levelname == "WARNING"
        assert_right(generator, model)
    with pytest.raises(ConfigurationError, match="use_cuda_graph=True cannot be had: CUDA refused"):
        generator_of(model, **ONE)


@pytest.mark.parametrize(
    "settings", [{"use_default_compile_configs": False}, {"use_cuda_graph": False}]
)
def test_a_compilation_is_switched_off(settings, fast, monkeypatch):
    monkeypatch.setattr(inductor, "compile_graph", fails)
    with generator_of(tiny_model("qwen3", **SMALL), **{**ONE, **settings}) as generator:
        assert "; forwards: by the model; CUDA graphs: o" in generator.manager.decode_path


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_inductors_code_gives_the_models_tokens(family, fast):
    model = tiny_model(family, **SMALL)
    with generator_of(model, use_default_compile_configs=False, **ONE) as generator:
        expected = assert_right(generator, model)
    with generator_of(model, **ONE) as generator:
        assert "forwards: compiled" in generator.manager.decode_path
        assert assert_right(generator, model) == expected
