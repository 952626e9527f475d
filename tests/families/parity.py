"""One check for every architecture: the engine against the model's plain forward and `generate`.

Several prompts of different lengths and a forked group run at once in too few blocks, so that some
are preempted; in mid-flight the weights change. Used by the tests, and by the script that writes
docs/architectures.md.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from configs import tiny_config
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.compat.fsdp import write_state
from cb_rollout.compat.module_state import model_settings, watched_tensors
from cb_rollout.engine.request import Request

TOLERANCE = 1e-5
# Nats, in float32.

ROUNDING_SHARE = 4.0
# How much more than the plain forward's own rounding the engine may differ where that is larger:
# either side rounds, in another order.

SHARPNESS = 4.0
# Multiplies fresh weights, whose outputs are so near uniform that a wrong cache is not seen.

GREEDY_LENGTHS = (3, 17, 30)
GROUP_LENGTH, GROUP_SIZE = 13, 3
NEW_TOKENS = 12
TOKENS_BEFORE_CHANGE = 5
NUM_BLOCKS = 16
# Of 4 tokens; all sequences at once would need 38.

WEIGHT_CHANGE = 0.9


@dataclass
class Parity:
    """What the check found."""

    drift: float = 0.0
    """Largest |log-probability - plain forward's|, in nats."""
    rounding: float = 0.0
    """Largest |plain forward - plain forward in float64|; measured where the drift is large."""
    margin: float = 0.0
    """Largest advantage, in nats, that another token had over a greedy one in the plain forward."""
    is_as_generate: bool = True
    """Whether the greedy tokens are those of the model's own `generate`."""
    batch_layout: str = ""
    num_preemptions: int = 0

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE, ROUNDING_SHARE * self.rounding)


def create_model(
    model_type: str, auto_class: Any = AutoModelForCausalLM, **overrides: object
) -> PreTrainedModel:
    """A tiny float32 model with sharpened random weights, in eval mode; the same each time."""
    return create_from_config(tiny_config(model_type, **overrides), auto_class)


def create_from_config(config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(config)
        with torch.no_grad():
            for module in model.modules():
                # A row of zeros scores every token alike: a tie, which any rounding may break.
                if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx].normal_(std=0.02)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(SHARPNESS)
    # Some types' own generation settings force or suppress tokens.
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    return model.eval()


def prompts(*lengths: int) -> list[list[int]]:
    draws = random.Random(0)
    return [[draws.randrange(3, 128) for _ in range(length)] for length in lengths]


def check(model: PreTrainedModel) -> Parity:
    """Run the engine step by step, and compare everything it says.

    Raises:
        ConfigurationError: the engine refuses the model.
    """
    found = Parity()
    config = RolloutConfig(
        seed=0,
        block_size=4,
        num_blocks=NUM_BLOCKS,
        max_batch_tokens=24,
    )
    with RolloutGenerator(model, config) as generator:
        engine, state = generator.manager.engine, state_beside_weights(model)
        greedy = SamplingParams(do_sample=False, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        sampled = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        *inputs, group = prompts(*GREEDY_LENGTHS, GROUP_LENGTH)
        create = generator.manager.create_requests
        requests = create(inputs, [greedy] * len(inputs))
        requests += create([group], [sampled], members=range(GROUP_SIZE))
        for request in requests:
            engine.add(request)
        while engine.has_work and requests[1].num_generated < TOKENS_BEFORE_CHANGE:
            engine.step()
        compare(model, requests, [0] * len(requests), found)
        compare_with_generate(model, requests[: len(inputs)], found)
        starts = [request.num_generated for request in requests]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(WEIGHT_CHANGE)
        engine.begin_policy_version(1)
        while engine.has_work:
            engine.step()
        compare(model, requests, starts, found)
        assert [request.num_generated for request in requests] == [NEW_TOKENS] * len(requests)
        assert engine.num_blocks_used == 0
        # Else each rollout would probe the model again, or begin a policy version of its own.
        assert state_beside_weights(model) == state, "a rollout changes what identifies the model"
        found.num_preemptions = engine.counters.preemptions
        found.batch_layout = engine.runner.batch_layout.value
    return found


def state_beside_weights(model: PreTrainedModel) -> tuple[list[object], list[object]]:
    """What identifies the function that a model computes, but for its parameters."""
    buffers = [t for t in watched_tensors(model) if not isinstance(t, torch.nn.Parameter)]
    return model_settings(model), [write_state(buffer) for buffer in buffers]


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """After every token, over the vocabulary, by one forward without cache or padding."""
    input_ids = torch.tensor([token_ids])
    output = model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False)
    return output.logits[0].log_softmax(-1)


def compare(
    model: PreTrainedModel, requests: Sequence[Request], starts: Sequence[int], found: Parity
) -> None:
    """Hold what was generated since `starts` against a plain forward under the present weights."""
    drift, rounded = 0.0, []
    for request, start in zip(requests, starts, strict=True):
        tokens = request.token_ids[len(request.prompt_ids) + start :]
        if not tokens:
            continue
        expected = plain_logprobs(model, request.token_ids)[-1 - len(tokens) : -1]
        chosen = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        drift = max(drift, (chosen - torch.tensor(request.logprobs[start:])).abs().max().item())
        rounded.append((request.token_ids, tokens, chosen))
        if request.params.is_greedy:
            margin = (expected.max(-1).values - chosen).max().item()
            found.margin = max(found.margin, margin)
    found.drift = max(found.drift, drift)
    if drift > TOLERANCE:
        exact_model = copy.deepcopy(model).double()
        # The fused kernels of experts know no float64.
        exact_model.set_experts_implementation("eager")
        for token_ids, tokens, chosen in rounded:
            expected = plain_logprobs(exact_model, token_ids)[-1 - len(tokens) : -1]
            exact = expected.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
            found.rounding = max(found.rounding, (chosen - exact).abs().max().item())


def compare_with_generate(
    model: PreTrainedModel, requests: Sequence[Request], found: Parity
) -> None:
    for request in requests:
        if not request.num_generated:
            continue
        input_ids = torch.tensor([request.prompt_ids])
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=request.num_generated,
            eos_token_id=-1,
            do_sample=False,
        )
        found.is_as_generate &= output[0].tolist() == request.token_ids
