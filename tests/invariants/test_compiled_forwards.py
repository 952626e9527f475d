"""Prefill and decode steps that a `CompileConfig` compiles compute what the model does.

The backend "eager" runs what dynamo captured without C++; inductor runs in the slow tests.
"""

import logging

import pytest
import torch
from nightly import slow_after
from peft import LoraConfig, get_peft_model
from tiny import plain_logprobs, tiny_model
from torch._dynamo.utils import counters
from transformers import CompileConfig, GenerationConfig

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, generate_batch
from cb_rollout.config.compilation import CompileSettings
from cb_rollout.errors import ConfigurationError, RolloutError

ALL_SIZES = {"backend": "eager", "mode": None, "dynamic": True, "fullgraph": True}
PATHS = ("varlen_compile_config", "decode_compile_config")


@pytest.fixture(autouse=True)
def _counters_of_zero():
    counters.clear()


def both(**settings):
    return dict.fromkeys(PATHS, ALL_SIZES | settings)


def prompts_of(number):
    return [[5 + row] * (2 + 3 * row + number) for row in range(number)]


def paths_of(generator):
    return {path.part: path.text for path in generator.manager.engine.paged_model.paths}


def compiled_of(generator):
    runner = generator.manager.engine.runner
    return runner.compiled_prefill.graph, runner.attention_backend.traced_forward.trace


def assert_right(generator, model, prompts, tolerance=1e-5, plain=None):
    outputs = generator.generate_batch(prompts, max_new_tokens=5).values()
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = plain_logprobs(plain or model, prompt, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("gpt2", "llama", "mistral", "qwen3_moe", "gpt_oss")
        ),
    ],
)
def test_compiled_forwards_of_every_size_give_the_models_log_probabilities(family):
    model = tiny_model(family)
    with RolloutGenerator(model, RolloutConfig(seed=3, **both())) as generator:
        assert paths_of(generator)["prefill"] == "packed, compiled"
        assert paths_of(generator)["forwards"] == "compiled"
        for number in (1, 2, 3, 5, 9):
            assert_right(generator, model, prompts_of(number))
        graphs = compiled_of(generator)
        assert None not in graphs
        assert counters["stats"]["unique_graphs"] == len(PATHS)
        with torch.no_grad():
            next(model.parameters()).mul_(1.5)
        generator.sync_weights()
        assert_right(generator, model, prompts_of(4))
        assert compiled_of(generator) == graphs
    assert counters["stats"]["unique_graphs"] == len(PATHS)
    # The user's module stays as it was.
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.slow
def test_chunks_of_prompts_and_shared_prefixes_are_compiled_too():
    model = tiny_model("qwen3", num_hidden_layers=1)
    config = RolloutConfig(seed=3, block_size=4, max_batch_tokens=8, **both())
    with RolloutGenerator(model, config) as generator:
        shared = list(range(5, 30))
        assert_right(generator, model, [shared, [*shared, 40, 41], [7] * 21, [*shared, 50]])
        before = generator.manager.counters.prefill_tokens
        assert_right(generator, model, [[*shared, 60]])
        assert generator.manager.counters.prefill_tokens - before < len(shared)
        assert generator.manager.counters.prefill_forwards > 10
    assert counters["stats"]["unique_graphs"] == len(PATHS)


@pytest.mark.slow
def test_static_graphs_are_bounded_by_the_sizes_that_inputs_are_padded_to():
    model = tiny_model("qwen3", num_hidden_layers=1)
    settings = both(dynamic=False) | {"q_padding_interval_size": 32, "max_cached_graphs": 3}
    with RolloutGenerator(model, RolloutConfig(seed=3, **settings)) as generator:
        for number in (1, 2, 3, 4, 5):
            assert_right(generator, model, prompts_of(number))
        prefill, decode = compiled_of(generator)
        assert (prefill.compiled.num_graphs, decode.compiled.num_graphs) == (3, 1)
    assert counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
def test_a_setting_of_sizes_is_refused_where_nothing_has_them():
    with pytest.raises(ConfigurationError, match="q_padding_interval_size=32 needs a CUDA"):
        RolloutGenerator(tiny_model(), RolloutConfig(q_padding_interval_size=32, **both()))


def test_keys_are_padded_to_nothing_in_any_graph():
    model = tiny_model("qwen3", num_hidden_layers=1)
    config = RolloutConfig(seed=3, kv_padding_interval_size=64, decode_compile_config=ALL_SIZES)
    with RolloutGenerator(model, config) as generator:
        assert_right(generator, model, prompts_of(3))
        assert_right(generator, model, [[9] * 150])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "settings", slow_after(1, [{"use_cuda_graph": False}, {"use_cuda_graph": (False, False)}])
)
def test_steps_without_cuda_graphs_are_compiled_all_the_same(settings):
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(**settings, **both())) as generator:
        assert paths_of(generator)["forwards"] == "compiled"
        assert_right(generator, model, prompts_of(2))


@pytest.mark.slow
def test_16_bits_are_rounded_as_the_model_rounds_them():
    model = tiny_model("qwen3", num_hidden_layers=1).to(torch.bfloat16)
    with RolloutGenerator(model, RolloutConfig(seed=3, **both(backend="aot_eager"))) as generator:
        assert_right(generator, model, prompts_of(5), tolerance=0.1)
        compiled = prefill_logits(generator)
        generator.manager.engine.runner.compiled_prefill = None
        assert torch.equal(compiled, prefill_logits(generator))


def prefill_logits(generator):
    """Return the log-probabilities of first tokens, greedy, under a policy of its own."""
    generator.sync_weights()
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    outputs = generator.generate_batch(prompts_of(4), sampling_params=params).values()
    return torch.tensor([output.logprobs[0] for output in outputs])


@pytest.mark.slow
def test_autocast_is_compiled_as_the_model_computes_under_it():
    model = tiny_model("qwen3", num_hidden_layers=1)
    config = RolloutConfig(seed=3, rollout_dtype="bfloat16", **both())
    with RolloutGenerator(model, config) as generator:
        compiled = prefill_logits(generator)
        generator.manager.engine.runner.compiled_prefill = None
        assert torch.equal(compiled, prefill_logits(generator))


@pytest.mark.slow
def test_an_adapter_that_trains_is_followed():
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3", num_hidden_layers=1), lora).eval()
    config = RolloutConfig(seed=3, weight_sync="shared", **both())
    with RolloutGenerator(model, config) as generator:
        assert_right(generator, model, prompts_of(3))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.mul_(2)
        generator.sync_weights()
        assert_right(generator, model, prompts_of(3))
        assert counters["stats"]["unique_graphs"] == len(PATHS)
        with model.disable_adapter():
            generator.sync_weights()
            assert_right(generator, model, prompts_of(3))


@pytest.mark.slow
def test_a_copy_is_compiled_and_training_goes_on_uncompiled():
    model = tiny_model("qwen3", num_hidden_layers=1).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RolloutGenerator(model, RolloutConfig(seed=3, weight_sync="copy", **both())) as generator:
        for _ in range(2):
            assert_right(generator, model, prompts_of(3))
            input_ids = torch.tensor([[5, 6, 7, 8]])
            model(input_ids=input_ids, labels=input_ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            generator.sync_weights()
        assert model.training
    assert counters["stats"]["unique_graphs"] == len(PATHS)


@pytest.mark.slow
def test_a_hook_that_a_graph_would_not_call_is_called():
    model, calls = tiny_model("qwen3", num_hidden_layers=1), []
    with RolloutGenerator(model, RolloutConfig(seed=3, **both())) as generator:
        assert_right(generator, model, prompts_of(2))
        handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
        assert_right(generator, model, prompts_of(2))
        assert calls
        handle.remove()
        assert_right(generator, model, prompts_of(2))
        assert None not in compiled_of(generator)


@pytest.mark.slow
def test_a_weight_that_was_replaced_is_traced_anew():
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3, **both())) as generator:
        assert_right(generator, model, prompts_of(2))
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.3)
        generator.sync_weights()
        assert_right(generator, model, prompts_of(2))


@pytest.mark.slow
def test_the_generation_configs_compile_config_is_for_both_paths():
    model = tiny_model("qwen3", num_hidden_layers=1)
    theirs = GenerationConfig(
        do_sample=True, compile_config=CompileConfig(backend="eager", mode=None, dynamic=True)
    )
    with RolloutGenerator(model, RolloutConfig(seed=3), generation_config=theirs) as generator:
        assert_right(generator, model, prompts_of(3))
        assert None not in compiled_of(generator)
        other = GenerationConfig(compile_config=CompileConfig(backend="aot_eager", mode=None))
        with pytest.raises(ConfigurationError, match="compile_config of one call"):
            generator.generate_batch([[5]], other)
    assert counters["stats"]["unique_graphs"] == len(PATHS)
    counters.clear()
    generate_batch(model, [[5, 6]], theirs, progress_bar=False, max_new_tokens=3)
    assert counters["stats"]["unique_graphs"] == len(PATHS)


@pytest.mark.fast_cases("lfm2-settings3-default_compile_level=1 asks .*; leave it 0, or")
@pytest.mark.parametrize(
    ("family", "settings", "said"),
    [
        ("lfm2", {PATHS[0]: ALL_SIZES}, "compiled prefill, .*recurrent states or sparse attention"),
        ("deepseek_v3", {PATHS[0]: ALL_SIZES}, "its attention changes the keys that it caches"),
        ("lfm2", {PATHS[1]: ALL_SIZES}, "compiled decode steps, .*this model keeps recurrent st"),
        ("lfm2", {"default_compile_level": 1}, "default_compile_level=1 asks .*; leave it 0, or"),
        ("qwen3_moe", {"router_replay": True, PATHS[0]: ALL_SIZES}, "would record no routes"),
        ("qwen3_moe", {"router_replay": True, PATHS[1]: ALL_SIZES}, "would record no routes"),
        ("qwen3", {PATHS[0]: ALL_SIZES | {"backend": "warp"}}, "is refused by torch.compile"),
        ("qwen3", {PATHS[1]: ALL_SIZES | {"backend": "warp"}}, "is refused by torch.compile"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(family, settings, said):
    with pytest.raises(ConfigurationError, match=said):
        RolloutGenerator(tiny_model(family), RolloutConfig(**settings))


def failing(module, inputs):
    raise NotImplementedError("no such instruction")


@pytest.mark.fast_cases("decode_compile_config")
@pytest.mark.parametrize("path", PATHS)
def test_a_compilation_that_was_asked_for_and_fails_is_an_error(path):
    config = RolloutConfig(**{path: ALL_SIZES | {"backend": failing}})
    with pytest.raises(ConfigurationError, match=f"{path}: .*no such instruction.*leave it None"):
        RolloutGenerator(tiny_model("qwen3", num_hidden_layers=1), config)


@pytest.mark.parametrize("path", slow_after(1, PATHS))
def test_a_compilation_by_default_that_fails_is_given_up_with_one_warning(path, caplog):
    settings = CompileSettings(backend=failing, source="a default", raises_failure=False)
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3, **{path: settings})) as generator:
        for number in (2, 3):
            assert_right(generator, model, prompts_of(number))
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sum("no such instruction" in text for text in warned) == 1


class FailsLater:
    """A backend that compiles a few graphs and then no more."""

    def __init__(self, num_graphs):
        self.num_graphs = num_graphs

    def __call__(self, module, inputs):
        self.num_graphs -= 1
        if self.num_graphs < 0:
            raise NotImplementedError("no such instruction")
        return module.forward


@pytest.mark.fast_cases("True-decode_compile_config")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("raises", slow_after(1, [True, False]))
def test_a_compilation_that_fails_in_a_rollout_is_an_error_only_where_it_was_asked_for(
    path, raises
):
    settings = CompileSettings(
        backend=FailsLater(1), dynamic=False, source="the setting", raises_failure=raises
    )
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3, **{path: settings})) as generator:
        if raises:
            with pytest.raises(RolloutError, match=r"the setting: .*no such instruction"):
                generator.generate_batch(prompts_of(9), max_new_tokens=3)
        else:
            for number in (9, 2):
                assert_right(generator, model, prompts_of(number))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_inductor_gives_the_models_log_probabilities(dynamic):
    model = tiny_model("qwen3", num_hidden_layers=1)
    settings = both(backend="inductor", dynamic=dynamic)
    with RolloutGenerator(model, RolloutConfig(seed=3, **settings)) as generator:
        for number in (1, 3, 9):
            assert_right(generator, model, prompts_of(number))
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        generator.sync_weights()
        assert_right(generator, model, prompts_of(4))
    assert counters["stats"]["unique_graphs"] <= (12 if dynamic is False else 4)


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_level_compiles_both_paths(level):
    model = tiny_model("qwen3", num_hidden_layers=1)
    with RolloutGenerator(model, RolloutConfig(seed=3, default_compile_level=level)) as generator:
        assert paths_of(generator)["prefill"] == "packed, until compiled"
        assert_right(generator, model, prompts_of(3))
        assert None not in compiled_of(generator)


@pytest.mark.slow
def test_inductor_rounds_to_16_bits_where_the_model_does():
    model = tiny_model("qwen3", num_hidden_layers=1).to(torch.bfloat16)
    with RolloutGenerator(model, RolloutConfig(seed=3, **both(backend="inductor"))) as generator:
        assert_right(generator, model, prompts_of(5), tolerance=0.1)
