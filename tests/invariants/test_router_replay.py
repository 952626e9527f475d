"""The experts of the rollout are recorded, kept, and taken again in the loss."""

import copy
import itertools

import numpy as np
import pytest
import torch
from tiny import tiny_model

import cb_rollout
from cb_rollout import (
    ConfigurationError,
    IncompleteRolloutError,
    RolloutConfig,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.routers import Disagreement, find_routers, joined_routes
from cb_rollout.engine.sampling import sampler

# More experts than the families of `tiny` have, so that rounding changes a choice now and then.
MANY = {"num_experts_per_tok": 4, "num_hidden_layers": 3}
FAMILIES = {
    "qwen3_moe": MANY | {"num_experts": 64},
    "gpt_oss": MANY | {"num_local_experts": 64},
    "deepseek_v3": MANY | {"n_routed_experts": 64, "n_group": 4, "topk_group": 2},
    "mixtral": MANY | {"num_local_experts": 64},
    "granitemoe": MANY | {"num_local_experts": 64, "head_dim": None},
}
PROMPTS = [list(range(5, 45)), list(range(60, 77)), [9, 8, 7]]
PARAMS = SamplingParams(ignore_eos=True)
# Of a model that computes in bfloat16 and takes the same experts.
BF16_NATS = 0.05


def bf16_model(family, seed=0):
    return tiny_model(family, seed=seed, **FAMILIES[family]).to(torch.bfloat16)


def rolled_out(model, **settings):
    config = RolloutConfig(**({"router_replay": True, "seed": 0, "block_size": 16} | settings))
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch(
            PROMPTS, sampling_params=PARAMS, max_new_tokens=40, num_return_sequences=4
        )
        return list(outputs.values()), generator.metrics()


def logprobs_of(model, output, routes=None, counts=None):
    """Log-probabilities by a forward without padding, with an output's experts or its own."""
    with eval_mode(model), torch.no_grad():
        routers = find_routers(model, lambda ids: model(input_ids=ids, use_cache=False).logits)
    ids = torch.tensor([output.prompt_ids + output.generated_tokens])
    part = (output.routed_experts if routes is None else routes, 0, ids.shape[1])
    with routers.replaying(model, joined_routes([part], ids.device), counts):
        logits = model(input_ids=ids, use_cache=False).logits
    scores = logits[0, len(output.prompt_ids) - 1 : -1].float().log_softmax(-1)
    return scores.gather(-1, ids[0, len(output.prompt_ids) :, None])[:, 0]


def replayed_share(model):
    """Replay a rollout; return the share of experts that the loss would choose otherwise."""
    counts = Disagreement()
    outputs, _ = rolled_out(model)
    for output in outputs[::3]:
        num_tokens = len(output.prompt_ids) + len(output.generated_tokens) - 1
        assert output.routed_experts.dtype == np.uint8
        assert output.routed_experts.shape[0] == num_tokens
        replayed = logprobs_of(model, output, counts=counts)
        assert float((replayed - torch.tensor(output.logprobs)).abs().max()) < BF16_NATS
    return counts.take()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family == "qwen3_moe" else pytest.mark.slow)
        for family in FAMILIES
    ],
)
@torch.no_grad()
def test_some_experts_differ_between_rollout_and_loss_and_none_when_replayed(family):
    share, seed = 0.0, 0
    # Which routes lie within rounding of each other depends on the processor.
    while not share and seed < 8:
        share, seed = replayed_share(bf16_model(family, seed)), seed + 1
    assert 0 < share < 0.2


def test_preempted_tokens_keep_their_experts():
    model = bf16_model("qwen3_moe")
    settings = {"num_blocks": 18, "max_requests_per_batch": 12, "verify_every_steps": 0}
    outputs, metrics = rolled_out(model, **settings)
    assert metrics["rollout/preemptions"] > 0
    with torch.no_grad():
        for output in outputs[::3]:
            difference = logprobs_of(model, output) - torch.tensor(output.logprobs)
            assert float(difference.abs().max()) < BF16_NATS


def test_a_sequence_without_memory_to_sample_has_no_experts_of_its_last_token(monkeypatch):
    sample, calls = sampler.sample, itertools.count()

    def sample_three(*args):
        if next(calls) == 3:
            raise torch.OutOfMemoryError("full")
        return sample(*args)

    config = RolloutConfig(router_replay=True, seed=0)
    with RolloutGenerator(tiny_model("qwen3_moe"), config) as generator:
        monkeypatch.setattr(sampler, "sample", sample_three)
        with pytest.raises(IncompleteRolloutError, match=r"\(full\)") as caught:
            generator.generate_batch(PROMPTS[:1], sampling_params=PARAMS, max_new_tokens=5)
    (output,) = caught.value.outputs.values()
    assert len(output.generated_tokens) == 3
    assert len(output.routed_experts) == len(PROMPTS[0]) + 3 - 1


def test_a_sequence_that_outlives_its_policy_keeps_the_experts_of_its_tokens():
    model = tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    before = copy.deepcopy(model)
    with RolloutGenerator(model, RolloutConfig(router_replay=True, seed=0)) as generator:
        manager = generator.manager
        manager.start()
        request_id = manager.add_request(
            PROMPTS[0], streaming=True, sampling_params=PARAMS, max_new_tokens=60
        )
        stream = manager.request_id_iter(request_id)
        next(stream)
        with manager.pause("recompute"), torch.no_grad():
            for name, parameter in model.named_parameters():
                if "gate.weight" in name:
                    parameter.copy_(-parameter)
        *_, last = stream
    (_, num_old), (_, num_new) = last.policy_versions
    assert num_old + num_new == 60
    num_first = len(PROMPTS[0]) + num_old - 1
    with torch.no_grad():
        counts = Disagreement()
        logprobs_of(before, last, last.routed_experts[:num_first], counts)
        assert counts.take() == 0
        logprobs_of(model, last, last.routed_experts[:num_first], counts)
        assert counts.take() > 0.5
        # The new policy goes on from keys that it computed with the old experts.
        replayed = logprobs_of(model, last)[num_old:]
        own = logprobs_of(model, last, last.routed_experts[:0])[num_old:]
    assert last.logprobs[num_old:] == pytest.approx(replayed.tolist(), abs=1e-4)
    assert last.logprobs[num_old:] != pytest.approx(own.tolist(), abs=1e-2)


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_router_gradients_are_those_of_experts_forced_by_hand(checkpointing):
    model = tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    outputs, _ = rolled_out(model)
    output = outputs[0]
    # Experts that the routers would not choose, so that a run without them differs.
    routes = ((output.routed_experts.astype(np.int16) + 3) % 64).astype(np.uint8)

    def gradients(run):
        model.zero_grad()
        run().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if "gate.weight" in n}

    forced = copy.copy(routes)

    def by_hand():
        owns = []
        num_tokens = len(output.prompt_ids) + len(output.generated_tokens)
        for number, layer in enumerate(model.model.layers):
            chosen = torch.tensor(forced[:, number].astype(np.int64))

            def forward(hidden, gate=layer.mlp.gate, chosen=chosen):
                logits = torch.nn.functional.linear(hidden, gate.weight)
                probabilities = logits.float().softmax(-1)
                own = probabilities.topk(gate.top_k, dim=-1).indices
                chosen = torch.cat([chosen, own[len(chosen) : num_tokens]])
                scores = probabilities.gather(-1, chosen)
                if gate.norm_topk_prob:
                    scores = scores / scores.sum(-1, keepdim=True)
                return logits, scores.to(logits.dtype), chosen

            owns.append((layer.mlp.gate, forward))
        for gate, forward in owns:
            gate.forward = forward
        try:
            ids = torch.tensor([output.prompt_ids + output.generated_tokens])
            logits = model(input_ids=ids, use_cache=False).logits
            scores = logits[0, len(output.prompt_ids) - 1 : -1].float().log_softmax(-1)
            return scores.gather(-1, ids[0, len(output.prompt_ids) :, None])[:, 0]
        finally:
            for gate, _ in owns:
                del gate.forward

    expected = gradients(by_hand)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    found = gradients(lambda: logprobs_of(model, output, routes))
    own = gradients(lambda: logprobs_of(model, output))
    assert expected.keys() == found.keys()
    assert len(found) == 3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(own[name], gradient, rtol=1e-2, atol=1e-4)


def test_packed_log_probabilities_take_the_experts_of_the_rollout():
    model = bf16_model("qwen3_moe")
    outputs, _ = rolled_out(model)
    found = cb_rollout.packed_logprobs(model, outputs)
    for output, logprobs in zip(outputs, found, strict=True):
        difference = logprobs.detach() - torch.tensor(output.logprobs)
        assert float(difference.abs().max()) < BF16_NATS
    # A stale record is taken too: these are not the experts that the routers would choose.
    model.float()
    for output in outputs:
        output.routed_experts = (output.routed_experts + 3) % 64
    with torch.no_grad():
        found = cb_rollout.packed_logprobs(model, outputs)
        for output, logprobs in zip(outputs, found, strict=True):
            torch.testing.assert_close(logprobs, logprobs_of(model, output), rtol=0, atol=1e-3)


def test_a_token_costs_a_byte_for_each_layer_and_expert():
    model = bf16_model("qwen3_moe")
    plans = []
    for router_replay in (False, True):
        config = RolloutConfig(router_replay=router_replay, block_size=16, num_blocks=10)
        with RolloutGenerator(model, config) as generator:
            plans.append(generator.memory_plan())
    assert plans[1].bytes_per_block - plans[0].bytes_per_block == 16 * 3 * 4


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen3", {}), ("phimoe", {"head_dim": None, "num_local_experts": 4})],
    ids=["dense", "argmax"],
)
def test_a_model_without_such_routers_is_refused_in_a_sentence(family, settings):
    with pytest.raises(ConfigurationError, match=r"router_replay=True: .* no experts by torch"):
        RolloutGenerator(tiny_model(family, **settings), RolloutConfig(router_replay=True))


def test_decode_steps_are_neither_traced_nor_graphed_and_graphs_are_refused():
    model = bf16_model("qwen3_moe")
    with pytest.raises(ConfigurationError, match="use_cuda_graph=True"):
        RolloutGenerator(model, RolloutConfig(router_replay=True, use_cuda_graph=True))
    with pytest.raises(ConfigurationError, match="router_replay=True"):
        RolloutGenerator(model, RolloutConfig(router_replay=True, use_default_compile_configs=True))
