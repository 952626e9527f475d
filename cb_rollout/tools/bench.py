"""Time a rollout of a model, compared with transformers' continuous batching and `generate`.

Contenders take turns, so that a slow spell of the machine affects all of them. Each is a context
manager that yields a function, which runs a workload. A checkout's `scripts/bench.py` has more
workloads and peers. In a tensor's name B is rows and T tokens, padding included.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.rollout.checkpoint import load_model, torch_device
from cb_rollout.rollout.generator import RolloutGenerator

SEED = 0

# The best batch size for `generate` on a CPU: a larger batch waits longer for its longest sequence.
BATCH_SIZE = 64

# For transformers' manager: most of a page of its default size, 256 tokens, would be empty.
PAGE_SIZE = 32

# The manager's own checks need more room than a few tiny requests do.
MIN_PAGES = 1024

# As many tokens as in a batch of cb_rollout on a CPU.
MAX_BATCH_TOKENS = 1024

# Arguments of `AutoConfig.for_model`. The larger shape is that of Qwen3-0.6B.
SMALL_SHAPE: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 768, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_SMALLEST: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


class Workload(NamedTuple):
    """Prompts, and the number of tokens that each completion is forced to have."""

    prompts: list[list[int]]
    """One prompt for each completion; equal neighbours form a group."""
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


# Runs the workload that the contender was made for, or a part of it.
Run = Callable[[Workload], None]


def random_prompts(
    draws: random.Random, count: int, tokens: tuple[int, int], vocab_size: int
) -> list[list[int]]:
    """Return prompts of random ids; lengths are uniform between the two numbers of `tokens`."""
    shortest, longest = tokens
    prompts: list[list[int]] = []
    for _ in range(count):
        length = draws.randint(shortest, longest)
        prompts.append([draws.randrange(2, vocab_size) for _ in range(length)])
    return prompts


def long_tailed_lengths(
    draws: random.Random, count: int, log_mean: float, longest: int
) -> list[int]:
    """Return completion lengths as in training: most short, a few very long."""
    return [min(longest, max(1, int(draws.lognormvariate(log_mean, 0.9)))) for _ in range(count)]


def long_tailed(
    vocab_size: int,
    num_prompts: int,
    prompt_tokens: tuple[int, int],
    log_mean: float,
    longest: int,
    num_completions: int = 8,
) -> Workload:
    """Create groups of completions with long-tailed lengths, as in a training rollout.

    Args:
        vocab_size: size of the model's vocabulary; prompts are random token ids below it.
        num_prompts: number of groups.
        prompt_tokens: length of the shortest and of the longest prompt.
        log_mean: mean of the logarithm of a completion's length.
        longest: largest length of a completion, in tokens.
        num_completions: completions of each prompt.
    """
    draws = random.Random(SEED)
    grouped_prompts: list[list[int]] = []
    for prompt in random_prompts(draws, num_prompts, prompt_tokens, vocab_size):
        grouped_prompts.extend([prompt] * num_completions)
    lengths = long_tailed_lengths(draws, len(grouped_prompts), log_mean, longest)
    return Workload(grouped_prompts, lengths)


@contextmanager
def ours(
    model: Any,
    _: Workload,
    *,
    temperature: float = 1.0,
    syncs_weights: bool = True,
    **settings: Any,
) -> Iterator[Run]:
    """Run workloads with this package; `settings` are fields of `RolloutConfig` but the seed."""
    params = SamplingParams(ignore_eos=True, temperature=temperature)

    def run(workload: Workload) -> None:
        outputs = generator.generate_batch(
            workload.prompts, sampling_params=params, max_new_tokens=workload.lengths
        )
        for output in outputs.values():
            assert len(output.logprobs) == len(output.generated_tokens)
        if syncs_weights:
            generator.sync_weights()

    with RolloutGenerator(model, RolloutConfig(seed=SEED, **settings)) as generator:
        # In some workloads, the warm-up run has too few steps to make the trace.
        generator.manager.warmup()
        yield run


@contextmanager
def transformers_batching(model: Any, workload: Workload, **settings: Any) -> Iterator[Run]:
    """Run workloads with log-probabilities, on transformers' persistent batching manager."""
    model.destroy_cached_continuous_batching_manager()
    attention = model.config._attn_implementation
    prompts_and_lengths = zip(workload.prompts, workload.lengths, strict=True)
    sequence_tokens = [len(prompt) + length for prompt, length in prompts_and_lengths]
    fields = batching_fields(sequence_tokens, model.device.type) | settings
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max(workload.lengths), eos_token_id=-1, pad_token_id=0,
        ),
        continuous_batching_config=ContinuousBatchingConfig(**fields, return_logprobs=True),
    )  # fmt: skip
    manager.start()

    def run(workload: Workload) -> None:
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
        num_done = 0
        while num_done < len(workload.prompts):
            output = manager.get_result(timeout=600)
            assert output is not None, "no result within ten minutes"
            assert output.error is None, output.error
            if output.is_finished():
                num_done += 1
                assert len(output.logprobs) == len(output.generated_tokens)

    try:
        yield run
    finally:
        manager.stop(block=True)
        manager.destroy()
        model.set_attn_implementation(attention)


def batching_fields(sequence_tokens: list[int], device: str) -> dict[str, Any]:
    """Return the fields of the fastest `ContinuousBatchingConfig`.

    `sequence_tokens` are the lengths of the sequences at their ends, prompts included.
    """
    fields: dict[str, Any] = {"page_size": PAGE_SIZE}
    # transformers infers sizes from a CPU's memory, and clearing tensors that large takes seconds.
    if device == "cpu":
        num_pages = sum(math.ceil(tokens / PAGE_SIZE) for tokens in sequence_tokens)
        fields["num_blocks"] = max(MIN_PAGES, num_pages)
        fields["max_batch_tokens"] = MAX_BATCH_TOKENS
    return fields


@contextmanager
def generate(model: Any, _: Workload, *, batch_size: int) -> Iterator[Run]:
    """Run workloads with `model.generate`, in left-padded batches.

    A batch ends with its longest sequence.
    """

    def run(workload: Workload) -> None:
        for start in range(0, len(workload.prompts), batch_size):
            end = start + batch_size
            _generate(model, workload.prompts[start:end], workload.lengths[start:end])

    yield run


class StopAtLengths(StoppingCriteria):
    """End each row of `generate` at its own length."""

    def __init__(self, prompt_width: int, lengths: list[int], device: torch.device) -> None:
        self.ends = prompt_width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self.ends


def _generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> None:
    width = max(map(len, prompts))
    ids_BT = torch.zeros(len(prompts), width, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        start = width - len(prompt)
        ids_BT[row, start:] = torch.tensor(prompt)
        mask_BT[row, start:] = 1
    ids_BT = ids_BT.to(model.device)
    mask_BT = mask_BT.to(model.device)
    output = model.generate(
        ids_BT, attention_mask=mask_BT, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0,
        stopping_criteria=[StopAtLengths(width, lengths, model.device)],
    )  # fmt: skip
    assert output.shape[1] == width + max(lengths), "generate ended elsewhere than asked"


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes, the GPU's work included."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Wait until the GPU, if any, has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def create_model(shape: dict[str, Any], device: str, **overrides: Any) -> Any:
    """Create a model with random weights: float32 on a CPU, else bfloat16.

    `shape` and `overrides` are arguments of `AutoConfig.for_model`.
    """
    settings: dict[str, Any] = shape | {"eos_token_id": 1, "pad_token_id": 0} | overrides
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(SEED)
    with torch.device(device):
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def turns(
    name: str | None, device: str, repetitions: int, batch_size: int = BATCH_SIZE
) -> Iterator[tuple[str, float]]:
    """Yield the contender of each turn, and its tokens per second.

    `name` is a checkpoint; None: random weights. Raises ConfigurationError if there is no such
    checkpoint or device.
    """
    target = torch_device(device)
    is_cpu = target.type == "cpu"
    transformers.logging.set_verbosity_error()
    if name is None:
        model = create_model(SMALL_SHAPE if is_cpu else QWEN3_SMALLEST, target.type)
    else:
        model = load_model(name, "auto", device)
    vocab_size = model.config.get_text_config().vocab_size
    if is_cpu:
        workload = long_tailed(
            vocab_size, num_prompts=8, prompt_tokens=(20, 60), log_mean=3.2, longest=256
        )
    else:
        workload = long_tailed(
            vocab_size, num_prompts=16, prompt_tokens=(256, 512), log_mean=5.5, longest=1536
        )
    # Warm up with a part of the workload: a whole rollout of a real model takes minutes on a CPU.
    warm_up = Workload(workload.prompts[:8], workload.lengths[:8])
    contenders: dict[str, Any] = {
        "cb_rollout": ours,
        "transformers CB": transformers_batching,
        "model.generate": partial(generate, batch_size=batch_size),
    }
    for _ in range(repetitions):
        for row, contender in contenders.items():
            # Made anew for each turn, because transformers' manager changes the model's attention.
            with contender(model, workload) as run:
                run(warm_up)
                yield row, workload.num_tokens / timed(partial(run, workload))
