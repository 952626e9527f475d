"""Decode steps on a CPU: gathered, by the kernel, or from a trace, the tokens are the same."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import plain_logprobs, tiny_model
from torch import fx
from torch._inductor import config as inductor_config

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, generate_batch
from cb_rollout.compat import inductor
from cb_rollout.engine.attention import traced_forward
from cb_rollout.engine.attention.cpu import backend as cpu_backend
from cb_rollout.engine.attention.selector import BackendSelection
from cb_rollout.engine.model import check as model_check
from cb_rollout.engine.numerics import kernels
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.kept import kept_by

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [5, 6, 7], [20] * 17]
LENGTHS = [20, 3, 11, 6]
PARAMS = [SamplingParams(ignore_eos=True, temperature=t) for t in (0.0, 1.0, 0.7, 1.0)]


@pytest.fixture
def soon(monkeypatch):
    """Traces are made in the first rollout, after as many steps as a model is tried with."""
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 8)


def runner_of(generator):
    return generator.manager.engine.runner


def rollout(generator):
    outputs = generator.generate_batch(PROMPTS, sampling_params=PARAMS, max_new_tokens=LENGTHS)
    return list(outputs.values())


def assert_right(outputs, model):
    for output, prompt, params in zip(outputs, PROMPTS, PARAMS, strict=True):
        plain = plain_logprobs(model, prompt, output.generated_tokens, params.temperature or 1.0)
        assert output.logprobs == pytest.approx(plain, abs=1e-5)


def tokens_of(outputs):
    return [output.generated_tokens for output in outputs]


@pytest.mark.fast_cases("gpt2")
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "gpt2"),
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in ("qwen3_moe", "llama", "mistral", "lfm2")
        ),
    ],
)
def test_every_path_gives_the_same_tokens(family, monkeypatch):
    model = tiny_model(family)
    gathered = BackendSelection(None, "for comparison")
    with monkeypatch.context() as patched:
        patched.setattr(model_check, "select_backend", lambda *_, **__: gathered)
        with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
            assert runner_of(generator).attention_backend is None
            expected = tokens_of(rollout(generator))
    with RolloutGenerator(model, RolloutConfig(seed=3, use_cuda_graph=False)) as generator:
        assert runner_of(generator).backend_selection.name == "cpp"
        outputs = rollout(generator)
        assert tokens_of(outputs) == expected
        assert_right(outputs, model)
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_TRACE", 8)
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        outputs = rollout(generator)
        assert (runner_of(generator).attention_backend.traced_forward.trace is not None) == (
            family != "lfm2"
        )
        assert tokens_of(outputs) == expected
        assert_right(outputs, model)


@pytest.mark.slow
def test_a_warmed_up_engine_decodes_from_its_trace_at_once():
    model = tiny_model("qwen3", num_hidden_layers=1)
    kept = {"progress_bar": False, "persistent_manager": True, "max_new_tokens": 2}
    generate_batch(model, [[5]], warmup=False, **kept)
    generator = kept_by(model).generator
    traced = runner_of(generator).attention_backend.traced_forward
    assert traced.trace is None
    generate_batch(model.train(), [[5]], warmup=True, **kept)
    assert (trace := traced.trace) is not None
    generator.manager.warmup()
    assert model.training
    assert_right(rollout(generator), model.eval())
    assert traced.trace is trace
    generator.close()


@pytest.mark.slow
def test_compiled_decode_steps_give_the_same_tokens():
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        expected = tokens_of(rollout(generator))
    config = RolloutConfig(seed=3, use_default_compile_configs=True)
    with RolloutGenerator(model, config) as generator:
        assert "forwards: by the model, until compiled" in generator.manager.decode_path
        outputs = rollout(generator)
        assert tokens_of(outputs) == expected
        assert_right(outputs, model)
        trace = runner_of(generator).attention_backend.traced_forward.trace
        assert trace is not None
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        generator.sync_weights()
        assert_right(rollout(generator), model)
        assert runner_of(generator).attention_backend.traced_forward.trace is trace


def test_a_compilation_of_what_may_not_be_traced_is_refused():
    told = "use_default_compile_configs=True needs a trace of the forward, which "
    told += "use_cuda_graph=False forbids; leave it at its default"
    config = RolloutConfig(use_default_compile_configs=True, use_cuda_graph=False)
    with pytest.raises(ConfigurationError, match=told):
        RolloutGenerator(tiny_model("qwen3"), config)


def test_a_compilation_of_recurrent_states_is_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match=r"traced \(this model keeps recurrent states\)"):
        RolloutGenerator(tiny_model("lfm2"), RolloutConfig(use_default_compile_configs=True))


def test_training_goes_on_where_a_model_that_was_to_be_compiled_cannot_be_any_more():
    model = tiny_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = RolloutConfig(seed=3, use_default_compile_configs=True)
    with RolloutGenerator(model, config, optimizer=optimizer) as generator:
        model.lm_head.register_forward_hook(lambda *_: None)
        for _ in range(2):
            assert_right(rollout(generator), model)
            input_ids = torch.tensor([PROMPTS[-1]])
            model(input_ids=input_ids, labels=input_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            generator.sync_weights()
        assert_right(rollout(generator), model)
        assert runner_of(generator).attention_backend.traced_forward.trace is None


@pytest.mark.slow
def test_a_plan_made_anew_asks_nothing_of_a_forward_whose_weights_keep_moving(monkeypatch):
    monkeypatch.setattr(traced_forward, "MOST_TRACES", 1)
    model = tiny_model("qwen3")
    config = RolloutConfig(seed=3, use_default_compile_configs=True)
    with RolloutGenerator(model, config) as generator:
        rollout(generator)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.1)
        rollout(generator)
        assert not runner_of(generator).attention_backend.traced_forward.can_trace
        generator.manager.engine.training.num_steps = 1
        generator.sync_weights()
        assert generator.manager.engine.training.is_settled
        assert_right(rollout(generator), model)


def test_a_compilation_needs_a_compiler():
    with (
        inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigurationError, match=r"kernel needs a C\+\+ compiler, g\+\+ or"),
    ):
        RolloutGenerator(tiny_model("qwen3"), RolloutConfig(use_default_compile_configs=True))


@pytest.mark.slow
def test_a_forward_that_does_not_compile_runs_as_an_uncompiled_trace(monkeypatch, caplog):
    def fails(graph):
        raise RuntimeError("internal compiler error")

    monkeypatch.setattr(inductor, "compile_outputs", fails)
    model = tiny_model("qwen3")
    config = RolloutConfig(seed=3, use_default_compile_configs=True)
    with RolloutGenerator(model, config) as generator:
        assert_right(rollout(generator), model)
        assert runner_of(generator).attention_backend.traced_forward.trace is not None
    assert "decode forwards are not compiled: it does not compile" in caplog.text


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [
        pytest.param({}, True, marks=pytest.mark.slow),
        ({"use_default_compile_configs": False}, False),
        pytest.param({"numerics": "bitwise"}, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("soon")
def test_a_trace_that_is_kept_is_compiled_once_that_pays_off(settings, compiles, monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_COMPILING", 12)
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3, **settings)) as generator:
        for _ in range(2):
            assert_right(rollout(generator), model)
        trace = runner_of(generator).attention_backend.traced_forward.trace
        assert trace is not None
        assert trace.is_compiled == compiles


@pytest.fixture
def quick(monkeypatch):
    """Regions of a trace are run by torch in place of inductor."""

    def run_by_torch(graph):
        module = fx.GraphModule({}, graph)
        return lambda *inputs: module(*inputs)

    monkeypatch.setattr(inductor, "compile_outputs", run_by_torch)


@pytest.mark.slow
@pytest.mark.usefixtures("soon", "quick")
def test_other_weights_are_compiled_once_they_pay_off_too(monkeypatch):
    monkeypatch.setattr(traced_forward, "STEPS_BEFORE_COMPILING", 30)
    model = tiny_model("qwen3", num_hidden_layers=1)
    seen = []
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        for _ in range(2):
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 1.1)
            generator.sync_weights()
            for _ in range(2):
                assert_right(rollout(generator), model)
                trace = runner_of(generator).attention_backend.traced_forward.trace
                seen.append(trace.is_compiled)
    assert seen == [False, True, False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("soon", "quick")
def test_a_compiled_trace_that_fails_gives_way_to_an_uncompiled_one(monkeypatch, caplog):
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        generator.manager.warmup()
        traced = runner_of(generator).attention_backend.traced_forward
        assert traced.trace.is_compiled

        def fails(*_):
            raise RuntimeError("a kernel that fails")

        monkeypatch.setattr(traced.trace, "_compute", fails)
        assert_right(rollout(generator), model)
        assert not traced.trace.is_compiled
        assert "a trace of the decode forward failed and is no longer used" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_warm_up_compiles_where_that_pays_off():
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        traced = runner_of(generator).attention_backend.traced_forward
        generator.manager.warmup(num_steps=300)
        assert not traced.trace.is_compiled
        generator.manager.warmup()
        assert traced.trace.is_compiled
        assert_right(rollout(generator), model)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_model_in_float64_has_a_kernel_and_a_trace():
    model = tiny_model("qwen3").double()
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        assert runner_of(generator).backend_selection.name == "cpp"
        assert_right(rollout(generator), model)
        assert runner_of(generator).attention_backend.traced_forward.trace is not None


@pytest.mark.usefixtures("soon")
def test_a_trace_stays_while_weights_change_in_place():
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        assert_right(rollout(generator), model)
        trace = runner_of(generator).attention_backend.traced_forward.trace
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
        generator.sync_weights()
        assert_right(rollout(generator), model)
        assert runner_of(generator).attention_backend.traced_forward.trace is trace


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_trace_stays_while_released_weights_come_back_at_other_addresses():
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3, weight_sync="copy")) as generator:
        rollout(generator)
        copy, traced = generator.manager.model, runner_of(generator).attention_backend
        trace, others, addresses = traced.traced_forward.trace, [], set()
        assert trace is not None
        for _ in range(traced_forward.MOST_TRACES + 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            generator.sleep(level=2)
            # They take the addresses that were freed.
            others += [torch.empty_like(parameter) for parameter in model.parameters()]
            generator.sync_weights()
            addresses.add(copy.lm_head.weight.data_ptr())
            assert_right(rollout(generator), model)
            assert traced.traced_forward.trace is trace
        assert len(addresses) > 1


@pytest.mark.usefixtures("soon")
def test_a_trace_is_made_anew_for_another_weight_or_adapter():
    model = tiny_model("qwen3")
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    with RolloutGenerator(wrapped, RolloutConfig(seed=3)) as generator:
        decoding = runner_of(generator).attention_backend
        with_adapter = rollout(generator)
        assert_right(with_adapter, wrapped)
        with wrapped.disable_adapter():
            generator.sync_weights()
            without = rollout(generator)
            assert_right(without, wrapped)
        assert decoding.traced_forward.trace is not None
        assert tokens_of(without) != tokens_of(with_adapter)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_weights_that_keep_moving_and_hooks_end_traces():
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        decoding = runner_of(generator).attention_backend
        for turn in range(traced_forward.MOST_TRACES + 2):
            weight = model.lm_head.weight
            model.lm_head.weight = torch.nn.Parameter(weight.detach() * 1.1)
            generator.sync_weights()
            assert_right(rollout(generator), model)
            assert (decoding.traced_forward.trace is not None) == (
                turn < traced_forward.MOST_TRACES
            )
    config = RolloutConfig(seed=3)
    with RolloutGenerator(model, config) as generator:
        decoding = runner_of(generator).attention_backend
        rollout(generator)
        assert decoding.traced_forward.trace is not None
        seen = []
        hook = model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
        rollout(generator)
        assert len(seen) >= max(LENGTHS)
        assert decoding.traced_forward.trace is None
        hook.remove()
        assert_right(rollout(generator), model)
        assert decoding.traced_forward.trace is not None
        model.enable_input_require_grads()
        rollout(generator)
        assert decoding.traced_forward.trace is not None
        model.disable_input_require_grads()
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        decoding, inner = runner_of(generator).attention_backend, model.model.layers[1].mlp
        rollout(generator)
        assert decoding.traced_forward.trace is not None
        plain, inner.forward = inner.forward, lambda states: 2 * type(inner).forward(inner, states)
        for _ in range(2):
            generator.sync_weights()
            assert_right(rollout(generator), model)
            assert decoding.traced_forward.trace is not None
            inner.forward = plain


BFLOAT16 = [
    ("llama", {}),
    *(
        pytest.param(family, {}, marks=pytest.mark.slow)
        for family in ("qwen3", "qwen3_moe", "gpt_oss")
    ),
]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(("family", "settings"), BFLOAT16)
def test_a_model_in_bfloat16_rounds_no_more_than_its_own_forward(family, settings):
    """Both are compared with the float32 forward of the same weights."""
    model = tiny_model(family, **settings).bfloat16()
    exact = tiny_model(family, **settings).bfloat16().float()
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        assert "decode attention: cpp" in generator.manager.decode_path
        outputs = rollout(generator)
        assert runner_of(generator).attention_backend.traced_forward.trace is not None
    ours, own = [], []
    for output, params in zip(outputs, PARAMS, strict=True):
        ids = output.prompt_ids, output.generated_tokens, params.temperature or 1.0
        expected = torch.tensor(plain_logprobs(exact, *ids))
        ours.append(torch.tensor(output.logprobs) - expected)
        own.append(torch.tensor(plain_logprobs(model, *ids)) - expected)
    ours_mean, own_mean = (torch.cat(found).abs().mean() for found in (ours, own))
    assert 0 < ours_mean <= 1.3 * own_mean


def test_without_a_compiler_keys_are_gathered_and_the_reason_is_told(monkeypatch):
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        expected = tokens_of(rollout(generator))
    with (
        inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}),
        RolloutGenerator(model, RolloutConfig(seed=3)) as generator,
    ):
        told = "gathered (the kernel needs a C++ compiler, g++ or the one that CXX names ("
        assert told in generator.manager.decode_path
        outputs = rollout(generator)
        assert tokens_of(outputs) == expected
        assert_right(outputs, model)


def test_a_kernel_that_does_not_compile_fails_no_request(monkeypatch):
    def fails(source, **_):
        raise RuntimeError("internal compiler error")

    monkeypatch.setattr(inductor, "compile_library", fails)
    monkeypatch.setattr(cpu_backend, "kernel", kernels.kernel.__wrapped__)
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        assert "internal compiler error" in runner_of(generator).backend_selection.reason
        assert_right(rollout(generator), model)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_what_a_trace_gives_may_be_written_to():
    model = tiny_model("qwen3")

    class Bans:
        def __call__(self, context, logits):
            logits[:, 7:] = -torch.inf
            return logits

    params = SamplingParams(ignore_eos=True, logits_processors=(Bans(),))
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        outputs = generator.generate_batch(PROMPTS, sampling_params=params, max_new_tokens=20)
        assert runner_of(generator).attention_backend.traced_forward.trace is not None
    assert all(max(output.generated_tokens) < 7 for output in outputs.values())


@pytest.mark.usefixtures("soon")
def test_a_trace_that_fails_is_given_up_and_the_model_runs(caplog):
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3)) as generator:
        expected = tokens_of(rollout(generator))
        decoding = runner_of(generator).attention_backend

        def fails(*_):
            raise RuntimeError("not for so many rows")

        decoding.traced_forward.trace._compute = fails
        outputs = rollout(generator)
        assert_right(outputs, model)
        assert decoding.traced_forward.trace is None
    said = "failed and is no longer used: RuntimeError: not for so many rows"
    assert said in caplog.text
    assert len(expected) == len(outputs)


@pytest.mark.fast_cases("bug0-settings1")
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("settings", [{}, {"use_default_compile_configs": True}])
@pytest.mark.parametrize("bug", [KeyError("a bug"), MemoryError("a bug")])
def test_a_trace_that_cannot_be_made_fails_no_request(bug, settings, monkeypatch, caplog):
    def fails(*_, **__):
        raise bug

    monkeypatch.setattr(traced_forward, "Trace", fails)
    model = tiny_model("qwen3")
    with RolloutGenerator(model, RolloutConfig(seed=3, **settings)) as generator:
        assert_right(rollout(generator), model)
        assert not runner_of(generator).attention_backend.traced_forward.can_trace
        assert generator.manager.counters.preemptions == 0
    levels = {record.levelname for record in caplog.records if "a bug" in record.message}
    assert levels == {"WARNING"}
