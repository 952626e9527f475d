"""What the fast decode path promises, on the device it is for; `scripts/gpu_check.sh` runs it."""

from dataclasses import replace

import pytest
import torch
from fast_path import graphs_of
from tiny import tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.engine.model.check import BLOCK_SIZE, _after_each, _forwards, _paged, text_rows
from cb_rollout.engine.model.eval_mode import eval_mode

pytestmark = pytest.mark.gpu

PATHS = {"gathered": None, "kernels": False, "graphs": True, "compiled": True}
PROMPTS = [[3 + (7 * row + 5 * place) % 200 for place in range(9 + 40 * row)] for row in range(4)]
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=40)


def generator_of(model, path="graphs", **settings):
    asked = {"use_cuda_graph": PATHS[path], "use_default_compile_configs": path == "compiled"}
    config = RolloutConfig(seed=1, **asked | settings)
    if path == "gathered":
        config = RolloutConfig(seed=1, use_cuda_graph=False, **settings)
    generator = RolloutGenerator(model, config)
    runner = generator.manager.engine.runner
    assert runner.backend_selection.name == "triton", runner.backend_selection
    if path == "gathered":
        runner.use(replace(runner.execution, attention_backend=None))
    return generator


def rollout(model, path, params=GREEDY, **settings):
    with generator_of(model, path, **settings) as generator:
        outputs = generator.generate_batch(
            PROMPTS, sampling_params=params, num_return_sequences=4
        ).values()
        assert generator.manager.engine.num_blocks_used == 0
        graphs = graphs_of(generator)
        assert bool(graphs and graphs.num_graphs) is (path in ("graphs", "compiled"))
        assert ("forwards: compiled" in generator.manager.decode_path) is (path == "compiled")
    return [o.generated_tokens for o in outputs], [o.logprobs for o in outputs]


@pytest.mark.parametrize("path", ["kernels", "graphs", "compiled"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gpt_oss", "mistral"])
def test_in_float32_the_tokens_are_those_of_the_gathered_path(family, path):
    model = tiny_model(family).cuda()
    tokens, logprobs = rollout(model, "gathered")
    found_tokens, found_logprobs = rollout(model, path)
    assert found_tokens == tokens
    for found, expected in zip(found_logprobs, logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_recurrent_states_move_as_on_the_gathered_path(family):
    model = tiny_model(family).cuda()
    tokens, logprobs = rollout(model, "gathered")
    found_tokens, found_logprobs = rollout(model, "graphs")
    assert found_tokens == tokens
    for found, expected in zip(found_logprobs, logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)


def test_sampled_tokens_are_the_same_with_and_without_a_graph():
    model = tiny_model("qwen3").cuda()
    params = SamplingParams(ignore_eos=True, max_new_tokens=40)
    assert rollout(model, "graphs", params)[0] == rollout(model, "kernels", params)[0]


def test_steps_ahead_of_their_tokens_change_none():
    """Sequences end by stop tokens that only the host finds, and others take their places."""
    model = tiny_model("qwen3", vocab_size=24).cuda()
    params = SamplingParams(max_new_tokens=40, stop_token_ids=[3, 5, 7])
    asked = {"max_requests_per_batch": 6}
    found = [
        rollout(model, "graphs", params, use_async_batching=looks_ahead, **asked)
        for looks_ahead in (False, True)
    ]
    assert found[0][0] == found[1][0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_log_probabilities_are_as_near_the_plain_forward_as_the_gathered_ones(
    dtype,
):
    """The same tokens through every path: the kernels may differ from the plain forward by no
    more than a small multiple of what the gathered path does."""
    model = tiny_model("qwen3").cuda().to(dtype)
    with generator_of(model) as generator:
        engine = generator.manager.engine
        runner = engine.runner
        rows, forwards = text_rows(runner), _forwards(engine.paged_model.layout)
        with eval_mode(model):
            direct = _paged(runner, rows, engine.paged_model.layout)
            runner.use(replace(runner.execution, attention_backend=None))
            gathered = _paged(runner, rows, engine.paged_model.layout)
            plain = _after_each([runner.plain_logits(row) for row in rows], forwards)
    assert len(rows[0]) > BLOCK_SIZE
    allowed = 3 * (gathered - plain).abs().mean() + 1e-3
    assert (direct - plain).abs().mean() <= allowed


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_a_compiled_step_in_bfloat16_is_as_near_the_plain_forward_as_the_models_own(weight_sync):
    """Under graphs, on the same tokens: the mean difference of log-probabilities, in nats."""
    model = tiny_model("qwen3").cuda().bfloat16()
    params, means = SamplingParams(ignore_eos=True, max_new_tokens=40), {}
    for path in ("graphs", "compiled"):
        with generator_of(model, path, weight_sync=weight_sync) as generator:
            generator.generate_batch(PROMPTS, sampling_params=params, num_return_sequences=4)
            assert ("forwards: compiled" in generator.manager.decode_path) is (path == "compiled")
            means[path] = generator.verify(16).mean
    assert means["compiled"] <= 2 * means["graphs"] + 1e-3


def test_graphs_and_log_probabilities_survive_training_sleep_and_growth():
    model = tiny_model("qwen3").cuda()
    with generator_of(model) as generator:
        run = lambda: generator.generate_batch(PROMPTS[:1], sampling_params=GREEDY)  # noqa: E731
        run()
        graphs = graphs_of(generator)
        kept = dict(graphs._graphs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.05)
        generator.sync_weights()
        generator.sleep()
        assert generator.metrics()["rollout/kv_bytes"] == 0
        filler = torch.empty(64 << 20, device="cuda")  # pages will lie elsewhere
        generator.wake()
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        output = next(iter(run().values()))
        del filler
        assert all(graphs._graphs[key] is replay for key, replay in kept.items())
        report = generator.verify(1)
    assert len(output.logprobs) == 40
    assert report.max < 1e-3


def test_a_weight_that_moved_has_its_graphs_captured_anew():
    model = tiny_model("qwen3").cuda()
    with generator_of(model) as generator:
        generator.generate_batch(PROMPTS[:1], sampling_params=GREEDY)
        before = list(graphs_of(generator)._graphs.values())
        weight = model.model.layers[0].mlp.up_proj.weight
        weight.data = weight.data * 1.5
        generator.sync_weights()
        generator.generate_batch(PROMPTS[:1], sampling_params=GREEDY)
        after = list(graphs_of(generator)._graphs.values())
        assert not set(before) & set(after)
        assert generator.verify(1).max < 1e-3


def test_a_trainers_forward_beside_the_engine_is_what_it_was():
    model = tiny_model("qwen3").cuda()
    ids = torch.tensor([PROMPTS[0]], device="cuda")
    before = model(ids).logits
    with generator_of(model) as generator:
        generator.generate_batch(PROMPTS, sampling_params=GREEDY)
        assert torch.equal(model(ids).logits, before)
    assert torch.equal(model(ids).logits, before)
