"""Random rollouts of one model with numerics="bitwise", as a state machine.

Whatever was sampled under some weights is compared in every bit with forwards under these weights:
of each row alone, of padded batches as a trainer runs them, and packed.
"""

import random
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch
from parity import create_model
from transformers import PreTrainedModel

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, bitwise, packed_logprobs
from cb_rollout.engine.request import Request

# Few blocks, so that sequences are preempted; small pages and chunks; and what an engine chooses.
ENGINES: tuple[dict[str, Any], ...] = (
    {"block_size": 4, "num_blocks": 26, "max_batch_tokens": 24},
    {
        "block_size": 3,
        "num_blocks": 30,
        "max_batch_tokens": 7,
        "max_requests_per_batch": 5,
        "allow_block_sharing": False,
        "use_cuda_graph": False,
    },
    {"num_blocks": 40},
)

TYPES = (
    # Dense.
    "bloom",
    "falcon",
    "glm4",
    "gpt2",
    "granite",
    "llama",
    "nemotron",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
    # Sliding windows, sinks and soft caps.
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "mistral",
    "olmo3",
    # Experts, and latent attention.
    "deepseek_v2",
    "deepseek_v3",
    "mixtral",
    "qwen3_moe",
    # State spaces beside attention and experts, short convolutions, state spaces alone.
    "jamba",
    "lfm2",
    "mamba",
)

# Falcon with one head of keys multiplies in an order that depends on the number of rows.
SETTINGS: dict[str, dict[str, Any]] = {"falcon": {"multi_query": False}}

LONGEST_PROMPT, MAX_NEW_TOKENS = 40, 24

# Rows of one padded forward, which also has empty columns.
ROWS_OF_A_FORWARD, EMPTY_COLUMNS = 8, 5

FIRST_TOKEN, END_OF_TOKENS = 3, 100


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Take dropout out, as TRL does unless it is asked not to."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def compare_rollouts(model_type: str, num_sequences: int, seed: int = 0) -> "Rollouts":
    """Sample sequences on each of `ENGINES` in random order of events, and compare them.

    Args:
        model_type: one of `TYPES`.
        num_sequences: sequences to submit at least, per engine.
        seed: decides the events and the sampled tokens.

    Raises:
        AssertionError: a log-probability has other bits than a forward of the trainer.
    """
    model = create_model(model_type, **SETTINGS.get(model_type, {}))
    without_dropout(model).train()
    num_threads = torch.get_num_threads()
    rollouts = Rollouts(model, seed)
    try:
        for settings in ENGINES:
            rollouts.run(settings, num_sequences)
    finally:
        torch.set_num_threads(num_threads)
    return rollouts


class Rollouts:
    """Requests, forks, steps, cancellations, threads and new weights, in any order."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self.seed = seed
        self.random = random.Random(seed)
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        # Sequences of which at least one token was compared, and their tokens.
        self.num_compared = self.num_tokens = 0
        self.num_preemptions = 0

    def run(self, settings: dict[str, Any], num_sequences: int) -> None:
        """Play events until so many sequences were submitted, then finish them."""
        config = RolloutConfig(seed=self.seed, numerics="bitwise", **settings)
        # Each request, and the number of its tokens that were compared.
        self.requests: list[Request] = []
        self.num_seen: list[int] = []
        events = (self.submit, self.step, self.step, self.cancel, self.set_threads)
        with RolloutGenerator(self.model, config) as generator, ExitStack() as stack:
            self.create_requests = generator.manager.create_requests
            self.engine = generator.manager.engine
            # As the loop does that this one stands for, also after a difference.
            stack.callback(self.engine.release_model)
            while len(self.requests) < num_sequences:
                for _ in range(self.random.randint(5, 40)):
                    self.random.choice(events)()
                self.update_weights()
            while self.engine.has_work:
                self.engine.step()
            self.compare()
            assert self.engine.num_blocks_used == 0
            self.num_compared += sum(number > 0 for number in self.num_seen)
            self.num_tokens += sum(self.num_seen)
            self.num_preemptions += self.engine.counters.preemptions

    def submit(self) -> None:
        draw, choice = self.random.randrange, self.random.choice
        length = draw(1, LONGEST_PROMPT)
        prompts = []
        for _ in range(draw(1, 4)):
            known = choice(self.requests).token_ids if self.requests else []
            shared = known[: draw(length) if draw(2) else 0]
            fresh = [draw(FIRST_TOKEN, END_OF_TOKENS) for _ in range(length - len(shared))]
            prompts.append([*shared, *fresh])
        params = SamplingParams(
            max_new_tokens=draw(1, MAX_NEW_TOKENS),
            ignore_eos=True,
            temperature=choice([1.0, 0.7, 0.0]),
            top_k=choice([0, 0, 8]),
            seed=choice([None, draw(10_000)]),
        )
        members = range(draw(1, 5))
        for request in self.create_requests(prompts, [params] * len(prompts), members=members):
            self.requests.append(request)
            self.num_seen.append(0)
            self.engine.add(request)

    def step(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            if self.engine.has_work:
                self.engine.step()

    def cancel(self) -> None:
        running = [one for one in self.requests if not one.status.is_final]
        if running:
            self.engine.cancel(self.random.choice(running))
            if not self.engine.has_work:
                self.engine.release_model()

    def set_threads(self) -> None:
        torch.set_num_threads(self.random.choice([1, 1, 1, 1, 2, 3]))

    def update_weights(self) -> None:
        self.compare()
        with torch.no_grad():
            for parameter, first in zip(self.model.parameters(), self.weights, strict=True):
                parameter.copy_(first * self.random.uniform(0.9, 1.1))
        self.engine.begin_policy_version(self.engine.policy_version + 1)

    def compare(self) -> None:
        """Compare the tokens that these weights sampled, in batches of random neighbours."""
        fresh = [
            index
            for index, request in enumerate(self.requests)
            if request.num_generated > self.num_seen[index]
        ]
        self.random.shuffle(fresh)
        batches = [
            fresh[start : start + ROWS_OF_A_FORWARD]
            for start in range(0, len(fresh), ROWS_OF_A_FORWARD)
        ]
        with bitwise(self.model):
            for batch in batches:
                padded = self.padded_logits([self.requests[index].token_ids for index in batch])
                for index, logits in zip(batch, padded, strict=True):
                    request = self.requests[index]
                    alone = self.padded_logits([request.token_ids], num_empty=0)[0]
                    self.require_equal(index, scored(request, logits), "padded")
                    self.require_equal(index, scored(request, alone), "alone")
            self.compare_packed(fresh)
        for index in fresh:
            self.num_seen[index] = self.requests[index].num_generated

    def compare_packed(self, indices: list[int]) -> None:
        by_temperature = defaultdict(list)
        for index in indices:
            by_temperature[temperature_of(self.requests[index])].append(index)
        for temperature, chosen in by_temperature.items():
            outputs = [self.requests[index].output() for index in chosen]
            with torch.no_grad():
                found = packed_logprobs(self.model, outputs, temperature=temperature)
            for index, logprobs in zip(chosen, found, strict=True):
                self.require_equal(index, logprobs.tolist(), "packed")

    def padded_logits(
        self, rows: list[list[int]], num_empty: int = EMPTY_COLUMNS
    ) -> list[torch.Tensor]:
        """Return each row's logits `[T, V]`, by one forward in which it begins anywhere."""
        width = max(map(len, rows)) + num_empty
        starts = [self.random.randint(0, width - len(row)) for row in rows]
        ids, mask = torch.zeros(2, len(rows), width, dtype=torch.int64)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[index, start : start + len(row)] = torch.tensor(row)
            mask[index, start : start + len(row)] = 1
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits.detach()
        return [
            logits[i, s : s + len(r)] for i, (r, s) in enumerate(zip(rows, starts, strict=True))
        ]

    def require_equal(self, index: int, expected: list[float], forward: str) -> None:
        start = self.num_seen[index]
        found = self.requests[index].logprobs[start:]
        assert found == expected[start:], (
            f"{forward}: {max(abs(a - b) for a, b in zip(found, expected[start:], strict=True))} "
            f"nats, of a prompt of {len(self.requests[index].prompt_ids)} tokens"
        )


def temperature_of(request: Request) -> float:
    """Return the temperature that its log-probabilities are reported at."""
    return request.params.temperature or 1.0


def scored(request: Request, logits: torch.Tensor) -> list[float]:
    """Return the log-probabilities of a request's tokens by the logits of all of its tokens."""
    start = len(request.prompt_ids)
    logprobs = (logits[start - 1 : -1].float() / temperature_of(request)).log_softmax(-1)
    tokens = torch.tensor(request.token_ids[start:])
    return logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
