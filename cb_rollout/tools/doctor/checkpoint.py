"""What a checkpoint is to the engine: its layers, its memory, and a generation held to its forward.

Raises for no fault of the checkpoint: a fault is a finding, the last one.
"""

import math
from collections.abc import Iterator

from transformers import PreTrainedModel

from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.memory.plan import GIB
from cb_rollout.engine.model.runner import BatchLayout
from cb_rollout.errors import ConfigurationError, RolloutError, said
from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.tools.doctor.finding import Finding, Level

PROMPT_TOKENS = (3, 17)
# One shorter than a block and one longer than the probe, so that padding is in play.

NEW_TOKENS = 8
SEQUENCES_EACH = 2

LARGEST_DRIFT = {"torch.float32": 1e-4}
LARGEST_DRIFT_OTHERWISE = 0.5
# In nats. Ten times what the tests hold tiny models to in float32; lower precisions differ by
# tenths on unlikely tokens whatever runs them, and a wrong cache differs by whole nats.


def checkpoint_findings(
    name: str, *, dtype: str = "auto", device: str = "auto", max_memory_percent: float = 0.8
) -> Iterator[Finding]:
    """Load a checkpoint, probe it, and generate a few tokens with it.

    Args:
        name: its directory, or its name on the hub.
        dtype: of the weights; "auto": the checkpoint's.
        device: "auto": a GPU where there is one.
        max_memory_percent: share of the free memory that the KV cache may take.
    """
    try:
        config = RolloutConfig(max_memory_percent=max_memory_percent, seed=0)
        model = load_model(name, dtype, device)
        yield _model(name, model)
        yield _tokenizer(name)
        with RolloutGenerator(model, config) as generator:
            yield from _cache(generator.manager.engine.layout)
            yield _rows(generator.manager.engine.batch_layout)
            yield from _memory(generator, model)
            yield _comparison(generator, model)
    except RolloutError as error:
        yield Finding(Level.BAD, "model", str(error))
    except Exception as error:  # noqa: BLE001  whatever a model raises is what was asked for
        yield Finding(
            Level.BAD, "model", f"cannot be rolled out ({said(error)}); use model.generate"
        )


def _model(name: str, model: PreTrainedModel) -> Finding:
    size = sum(parameter.nbytes for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    return Finding(
        Level.OK,
        "model",
        f"{name}: {type(model).__name__}, {count:,} parameters in "
        f"{torch_compat.compute_dtype(model)}, {size / GIB:.2f} GiB",
    )


def _tokenizer(name: str) -> Finding:
    try:
        tokenizer = load_tokenizer(name)
    except ConfigurationError as error:
        return Finding(Level.WARNING, "tokenizer", str(error))
    has_template = getattr(tokenizer, "chat_template", None) is not None
    return Finding(
        Level.OK,
        "tokenizer",
        f"{len(tokenizer):,} tokens, {'with a' if has_template else 'without'} chat template",
    )


def _cache(layout: CacheLayout) -> Iterator[Finding]:
    num_paged = sum(layer.bytes_per_token > 0 for layer in layout.layers)
    num_recurrent = sum(layer.is_recurrent for layer in layout.layers)
    num_neither = sum(
        not layer.is_recurrent and not layer.bytes_per_token for layer in layout.layers
    )
    yield Finding(
        Level.OK,
        "layers",
        f"{num_paged} with keys and values, {num_recurrent} with recurrent states, "
        f"{num_neither} with neither",
    )
    yield Finding(Level.OK, "bytes per token", f"{layout.bytes_per_token:,}")
    yield Finding(Level.OK, "bytes per sequence", f"{layout.bytes_per_sequence:,}")
    if layout.is_recurrent:
        why_not = "not used: recurrent states cannot be continued from keys"
        yield Finding(Level.OK, "chunks, known prefixes", why_not)
    else:
        yield Finding(Level.OK, "chunks, known prefixes", "used")


def _rows(form: BatchLayout) -> Finding:
    """How sequences share a forward, as the model check found it."""
    texts = {
        BatchLayout.PADDED: "of any lengths together in one forward",
        BatchLayout.EQUAL_LENGTHS: "of equal length together; others take a forward each, because "
        "the model counts positions itself or knows no padding",
        BatchLayout.SINGLE_ROWS: "one to a forward, because the model mixes the rows of a batch; "
        "slow",
    }
    level = Level.OK if form is BatchLayout.PADDED else Level.WARNING
    return Finding(level, "sequences run", texts[form])


def _memory(generator: RolloutGenerator, model: PreTrainedModel) -> Iterator[Finding]:
    engine, plan = generator.manager.engine, generator.memory_plan()
    yield Finding(
        Level.OK,
        "memory for the cache",
        f"{plan.budget_bytes / GIB:.2f} GiB: {plan.max_memory_percent:.0%} of "
        f"{plan.free_bytes / GIB:.2f} free, less what a trainer will still allocate",
    )
    yield Finding(
        Level.OK,
        "of it, at most",
        f"{plan.kv_bytes / GIB:.2f} GiB in {plan.num_blocks:,} blocks of "
        f"{engine.limits.block_size} tokens, {plan.state_bytes / GIB:.2f} GiB of recurrent states",
    )
    yield Finding(Level.OK, "sequences together", f"{engine.limits.max_requests:,} at most")
    num_tokens = plan.num_blocks * engine.limits.block_size
    longest = hf_compat.max_positions(model)
    yield Finding(
        Level.OK,
        "max tokens",
        f"{num_tokens:,} cached at once; {min(engine.max_sequence_tokens, longest or num_tokens):,}"
        f" in one sequence (the model's own limit: {longest or 'none named'})",
    )


def _comparison(generator: RolloutGenerator, model: PreTrainedModel) -> Finding:
    """Generate, and hold the log-probabilities to a plain forward."""
    vocab_size = hf_compat.vocab_size(model)
    prompts = [[(7 * i + 3) % vocab_size for i in range(length)] for length in PROMPT_TOKENS]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    generator.generate_batch(prompts, sampling_params=params, num_return_sequences=SEQUENCES_EACH)
    drift = generator.verify(len(prompts) * SEQUENCES_EACH)
    allowed = LARGEST_DRIFT.get(str(torch_compat.compute_dtype(model)), LARGEST_DRIFT_OTHERWISE)
    text = f"{drift.num_tokens} tokens, largest difference {drift.max:.2g} nats"
    if math.isfinite(drift.max) and drift.max <= allowed:
        return Finding(Level.OK, "rollout against forward", text)
    return Finding(
        Level.BAD,
        "rollout against forward",
        f"{text}, beyond {allowed:g}; this model cannot be rolled out here, use model.generate "
        "and report it with this output",
    )
