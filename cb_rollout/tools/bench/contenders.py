"""Contenders of a workload, each with the settings that make it fast, and the reasons for them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.tools.bench.workload import SEED, Workload

# Run a workload, or a part of the one that the contender was created for.
Run = Callable[[Workload], None]

# The page size of cb_rollout. Most of a page of transformers' default, 256, would be empty.
PAGE_SIZE = 32

# A manager's own checks need room beyond a few tiny requests.
MIN_PAGES = 1024

# As cb_rollout on a CPU.
MAX_BATCH_TOKENS = 1024

BATCHING_SETTINGS = (
    f"pages of {PAGE_SIZE}, since the default of 256 is mostly empty here; on a CPU, pages for all "
    f"sequences at once and batches of {MAX_BATCH_TOKENS} tokens, elsewhere as it infers"
)


class Contender(NamedTuple):
    """A way to run a workload."""

    create: Callable[[Any, Workload], AbstractContextManager[Run]]
    """Create what runs the workload on a model, and remove it on exit."""
    settings: str
    """The contender's settings, and why they are the best for it."""
    pid: int | None = None
    """Process that computes; None: this process."""


def ours(*, temperature: float = 1.0, syncs_weights: bool = True, **settings: Any) -> Contender:
    """Create a contender of this package, with `settings` of `RolloutConfig` besides the seed."""
    params = SamplingParams(ignore_eos=True, temperature=temperature)

    @contextmanager
    def create(model: Any, _: Workload) -> Iterator[Run]:
        def run(part: Workload) -> None:
            outputs = generator.generate_batch(
                part.prompts, sampling_params=params, max_new_tokens=part.lengths
            ).values()
            assert all(len(o.logprobs) == len(o.generated_tokens) for o in outputs)
            if syncs_weights:
                generator.sync_weights()

        with RolloutGenerator(model, RolloutConfig(seed=SEED, **settings)) as generator:
            # Some workloads have too few steps for the warm-up run to make the trace.
            generator.manager.warmup()
            yield run

    given = ", ".join(["its defaults", *(f"{name}={value}" for name, value in settings.items())])
    return Contender(create, f"{given}; temperature {temperature}, log-probabilities are checked")


def transformers_batching(**settings: Any) -> Contender:
    """Create a contender of transformers' continuous batching, with a persistent manager."""

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        model.destroy_cached_continuous_batching_manager()
        attention = model.config._attn_implementation
        longest = [len(p) + n for p, n in zip(workload.prompts, workload.lengths, strict=True)]
        fields = batching_fields(longest, model.device.type) | settings
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=max(workload.lengths), eos_token_id=-1, pad_token_id=0,
            ),
            continuous_batching_config=ContinuousBatchingConfig(**fields, return_logprobs=True),
        )  # fmt: skip
        manager.start()
        try:
            yield lambda part: _run_manager(manager, part)
        finally:
            manager.stop(block=True)
            manager.destroy()
            model.set_attn_implementation(attention)

    return Contender(create, f"a persistent manager with log-probabilities; {BATCHING_SETTINGS}")


def batching_fields(longest: list[int], device: str) -> dict[str, Any]:
    """Return the fields of the fastest `ContinuousBatchingConfig`; `longest`: of each sequence."""
    fields: dict[str, Any] = {"page_size": PAGE_SIZE}
    # Clearing the tensors of the sizes that transformers infers from a CPU's memory takes seconds.
    if device == "cpu":
        num_pages = sum(-(-tokens // PAGE_SIZE) for tokens in longest)
        fields |= {"num_blocks": max(MIN_PAGES, num_pages), "max_batch_tokens": MAX_BATCH_TOKENS}
    return fields


def _run_manager(manager: Any, workload: Workload) -> None:
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


def generate(batch_size: int) -> Contender:
    """Create a contender of `model.generate` on left-padded batches."""

    @contextmanager
    def create(model: Any, _: Workload) -> Iterator[Run]:
        def run(part: Workload) -> None:
            for start in range(0, len(part.prompts), batch_size):
                end = start + batch_size
                _generate(model, part.prompts[start:end], part.lengths[start:end])

        yield run

    return Contender(
        create,
        f"left-padded batches of {batch_size}, which --batch-size changes; no log-probabilities, "
        "and a batch ends with its longest sequence",
    )


class StopAtLengths(StoppingCriteria):
    """End each row of `generate` at its own length."""

    def __init__(self, prompt_width: int, lengths: list[int], device: torch.device) -> None:
        self.ends = prompt_width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return input_ids.shape[1] >= self.ends


def _generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> None:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    starts = torch.tensor([width - len(p) for p in prompts], device=model.device)
    mask = (torch.arange(width, device=model.device) >= starts[:, None]).long()
    output = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=max(lengths), eos_token_id=None, pad_token_id=0,
        stopping_criteria=[StopAtLengths(width, lengths, model.device)],
    )  # fmt: skip
    assert output.shape[1] == width + max(lengths), "generate ended elsewhere than asked"
