"""Who runs a workload: cb_rollout, transformers' continuous batching, and `model.generate`.

Each is given what makes it fast, and says what that is and why.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import cb_rollout
from cb_rollout.tools.bench.sizes import SEED
from cb_rollout.tools.bench.workload import Workload

Run = Callable[[Workload], None]
# Runs a workload, or a part of that which it was made for.


class Contender(NamedTuple):
    """Somebody who can run a workload."""

    create: Callable[[Any, Workload], AbstractContextManager[Run]]
    """Makes what it needs to run a workload with a model, and takes it away again."""
    settings: str
    """What it was given, and why that is best for it."""


PAGE_SIZE = 32
# As ours by default. Transformers' own default, 256, would leave most of a page of these empty.

MIN_PAGES = 1024
# A manager's own checks want room beyond a few tiny requests.

MAX_BATCH_TOKENS = 1024
# As ours on a CPU.

BATCHING_SETTINGS = (
    f"pages of {PAGE_SIZE}, since the default of 256 is mostly empty here; on a CPU, pages for all "
    f"sequences at once and batches of {MAX_BATCH_TOKENS} tokens, elsewhere as it infers"
)


def ours(**settings: Any) -> Contender:
    """This package; `settings` are fields of `RolloutConfig` beside the seed."""

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        del workload
        config = cb_rollout.RolloutConfig(seed=SEED, **settings)
        with cb_rollout.RolloutGenerator(model, config) as generator:
            yield rolling_out(generator)

    said = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Contender(create, f"its defaults{said and f', {said}'}; log-probabilities are checked")


def rolling_out(generator: cb_rollout.RolloutGenerator) -> Run:
    """A rollout with log-probabilities, and the sync after it, as in training."""
    params = cb_rollout.SamplingParams(ignore_eos=True)

    def run(workload: Workload) -> None:
        outputs = generator.generate_batch(
            workload.prompts, sampling_params=params, max_new_tokens=workload.lengths
        ).values()
        assert all(len(o.logprobs) == len(o.generated_tokens) for o in outputs)
        generator.sync_weights()

    return run


def transformers_batching(**settings: Any) -> Contender:
    """Transformers' own manager; `settings` are fields of its `ContinuousBatchingConfig`."""

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        model.destroy_cached_continuous_batching_manager()
        attention = model.config._attn_implementation
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=max(workload.lengths), eos_token_id=-1, pad_token_id=0,
            ),
            continuous_batching_config=_batching_config(model, workload, settings),
        )  # fmt: skip
        manager.start()
        try:
            yield lambda part: _run_manager(manager, part)
        finally:
            manager.stop(block=True)
            manager.destroy()
            model.set_attn_implementation(attention)

    return Contender(create, f"a persistent manager with log-probabilities; {BATCHING_SETTINGS}")


def _batching_config(
    model: Any, workload: Workload, settings: dict[str, Any]
) -> ContinuousBatchingConfig:
    longest = [len(p) + n for p, n in zip(workload.prompts, workload.lengths, strict=True)]
    fields = batching_fields(longest, model.device.type)
    return ContinuousBatchingConfig(**fields | settings, return_logprobs=True)


def batching_fields(longest: list[int], device: str) -> dict[str, Any]:
    """What a `ContinuousBatchingConfig` is best told.

    Args:
        longest: most tokens of each sequence.
        device: kind of it. Sizes are inferred from its memory, which on a CPU makes a batch of so
            many tokens that clearing its tensors takes seconds.
    """
    names = ContinuousBatchingConfig.__dataclass_fields__
    # Releases before 5.17 call a page a block.
    fields: dict[str, Any] = {"page_size" if "page_size" in names else "block_size": PAGE_SIZE}
    if device == "cpu":
        num_pages = sum(-(-tokens // PAGE_SIZE) for tokens in longest)
        fields |= {"num_blocks": max(MIN_PAGES, num_pages), "max_batch_tokens": MAX_BATCH_TOKENS}
    return fields


def _run_manager(manager: Any, workload: Workload) -> None:
    for prompt, length in zip(workload.prompts, workload.lengths, strict=True):
        manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
    num_done = 0
    while num_done < len(workload.prompts):
        output = manager.get_result(timeout=60)
        assert output is not None, "no result within a minute"
        assert output.error is None, output.error
        if output.is_finished():
            num_done += 1
            assert len(output.logprobs) == len(output.generated_tokens)


def generate(batch_size: int) -> Contender:
    """`model.generate` on left-padded batches."""

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        del workload

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
    """Ends every row of `generate` at its own length, and the batch when all are done."""

    def __init__(self, prompt_width: int, lengths: list[int], device: torch.device) -> None:
        self.ends = prompt_width + torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        """Which rows are done."""
        return input_ids.shape[1] >= self.ends


def _generate(model: Any, prompts: list[list[int]], lengths: list[int]) -> None:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device
    )
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(lengths),
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=[StopAtLengths(width, lengths, model.device)],
    )
    assert output.shape[1] == width + max(lengths), "generate ended elsewhere than asked"
