"""Check that a model with a paged cache computes the same as its plain forward, or refuse it.

Chooses the batch layout and the attention backend; does not change the runner. Log-probabilities in
float32 or wider reveal a model that looks ahead, counts positions in its own way, or stores its
past elsewhere. In the model's own precision, they reveal an engine that rounds differently.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.rope import RowRope
from cb_rollout.engine.attention.selector import BackendSelection, select_backend
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.kv_cache.recurrent import OpaqueStateAdapter
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.execution import BatchLayout, ModelCheck, PagedExecution
from cb_rollout.engine.model.runner import ModelRunner
from cb_rollout.engine.numerics.agreement import (
    Agreement,
    Reference,
    agrees,
    references,
    rounding_noise,
)
from cb_rollout.errors import ConfigurationError, error_text

# Three lengths, so that rows are padded, and two rows of one length, which run together unpadded.
PROMPT_LENGTHS = (4, 7, 4, 5)

# (row, its tokens after the forward): the first forward of a model that computes prompts in chunks.
# Two rows of different lengths begin in it; in the next forward, one continues as others begin.
CHUNKS = ((1, 4), (3, 5))

# Lengths of rows whose bits are compared: some exceed a vector, none is a multiple of its length.
LENGTHS_OF_BITS = (3, 38, 1, 17, 30)

# Small, so that every row has several blocks.
BLOCK_SIZE = 4

Result = TypeVar("Result")

Forward = Sequence[tuple[int, int]]
"""The rows of one forward, each with the number of its tokens that are computed after it."""


def check_model(runner: ModelRunner) -> ModelCheck:
    """Find how a model runs with a paged cache: cache layout, batch layout and attention backend.

    Args:
        runner: runs the model, and is left as it was; `ModelRunner.use` takes what is found.

    Raises:
        ConfigurationError: the model differs from its plain forward in every batch layout.
    """
    rows = text_rows(runner)
    with eval_mode(runner.model):
        plain = _plain_logits(runner, rows)
        layout, opaque_states = _probed(runner)
        execution = replace(
            runner.execution,
            attention_backend=None,
            rope=RowRope(runner.model),
            opaque_states=opaque_states,
        )
        if any(logits_TV.isnan().any() for logits_TV in plain):
            # Diverged weights show nothing about pages; the sampler refuses their tokens.
            return ModelCheck(layout=layout, execution=execution)
        if runner.is_bitwise:
            _require_same_bits(runner)
        expected = _references(runner, layout, rows, plain)
        execution = _with_batch_layout(runner, layout, execution, rows, expected)
        execution = _with_backend(runner, layout, execution, rows, expected)
    return ModelCheck(layout=layout, execution=execution)


def _plain_logits(runner: ModelRunner, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of rows by forwards without a cache, or refuse a model that has none."""
    plain, failure = attempt(lambda: [runner.plain_logits(row) for row in rows])
    if plain is None:
        raise ConfigurationError(
            f"{type(runner.model).__name__} does not run on token ids alone "
            f"({error_text(failure)}); load a decoder-only language model, or use model.generate."
        ) from failure
    return plain


def _probed(runner: ModelRunner) -> tuple[CacheLayout, OpaqueStateAdapter | None]:
    """Return the layout of a model's cache or states, or refuse the model."""
    layout, failure = attempt(runner.probe)
    if layout is not None:
        return layout, None
    opaque_states, _ = attempt(runner.probe_opaque_states)
    if opaque_states is not None:
        return opaque_states.layout, opaque_states
    raise ConfigurationError(
        f"{type(runner.model).__name__} does not work with transformers' own cache "
        f"({error_text(failure)}); use model.generate."
    ) from failure


def _with_batch_layout(
    runner: ModelRunner,
    layout: CacheLayout,
    execution: PagedExecution,
    rows: list[list[int]],
    expected: list[Reference],
) -> PagedExecution:
    """Choose the first batch layout in which pages agree with the plain forward.

    Args:
        runner: runs the model.
        layout: of its cache.
        execution: its other execution settings.
        rows: tokens to compare on.
        expected: what the plain forward computes for them.

    Raises:
        ConfigurationError: no batch layout agrees.
    """
    packing_obstacle = layout.packing_obstacle
    differs, failure = "", None
    for batch_layout in BatchLayout:
        is_packed = batch_layout is BatchLayout.PACKED
        if is_packed and packing_obstacle:
            continue
        tried = replace(execution, batch_layout=batch_layout, packing_obstacle=packing_obstacle)
        with runner.using(tried):
            differs, failure = difference(runner, layout, expected, partial(_paged, runner, rows))
        if not differs:
            return tried
        if is_packed:
            packing_obstacle = differs
    raise ConfigurationError(_refusal(runner, rows, differs)) from failure


def _with_backend(
    runner: ModelRunner,
    layout: CacheLayout,
    execution: PagedExecution,
    rows: list[list[int]],
    expected: list[Reference],
) -> PagedExecution:
    """Choose the attention backend of decode steps: the best one that agrees, or none.

    Args:
        runner: runs the model.
        layout: of its cache.
        execution: its other execution settings, without a backend.
        rows: tokens to compare on.
        expected: what the plain forward computes of them.
    """
    if not runner.reads_pages:
        gathered = BackendSelection(None, "max_blocks_per_request=0")
        return replace(execution, backend_selection=gathered)
    takes_any_lengths = execution.batch_layout.takes_any_lengths
    is_padded = takes_any_lengths and execution.opaque_states is None
    selection = select_backend(runner.device, layout, is_padded=is_padded)
    selected = replace(execution, backend_selection=selection)
    if selection.backend is None:
        return selected
    for reference in expected:
        layout_in_dtype = _layout_in_dtype(layout, reference)
        if reference.is_higher and selection.backend.obstacle(runner.device, layout_in_dtype):
            # Compared only in the model's own precision.
            continue
        backend = selection.backend(layout_in_dtype, runner.device)
        selected = replace(selected, attention_backend=backend)
        with runner.using(selected), devices.current(runner.device):
            paged = partial(_paged, runner, rows)
            differs, _ = difference(runner, layout, [reference], paged)
        if differs:
            reason = f"it is not the model's own attention: {differs}"
            return replace(execution, backend_selection=BackendSelection(None, reason))
    return selected


def _references(
    runner: ModelRunner, layout: CacheLayout, rows: list[list[int]], plain: list[torch.Tensor]
) -> list[Reference]:
    """Return the references for rows on pages, the most reliable first; `plain`: their logits."""
    dtype = runner.rounding_dtype
    if runner.is_bitwise:
        expected = _after_each(plain, _forwards(layout))
        no_noise = torch.zeros(len(expected))
        return [Reference(values=expected, noise=no_noise, dtype=dtype, is_higher=False)]

    def compute() -> torch.Tensor:
        return _after_each([runner.plain_logits(row) for row in rows], _forwards(layout))

    return references(
        compute,
        dtype,
        runner.computing_in,
        is_coarse=runner.computes_coarsely,
        can_raise_precision=not runner.is_split,
    )


def compare(
    runner: ModelRunner,
    layout: CacheLayout,
    reference: Reference,
    paged: Callable[[CacheLayout], torch.Tensor],
) -> Agreement:
    """Compare what `paged` computes on pages of a layout with a reference, in its precision."""
    layout_in_dtype = _layout_in_dtype(layout, reference)
    return reference.compare(partial(paged, layout_in_dtype), runner.computing_in)


def _layout_in_dtype(layout: CacheLayout, reference: Reference) -> CacheLayout:
    """Return the layout, storing at least as many bits as a reference was computed in."""
    return layout.at_least(reference.dtype) if reference.is_higher else layout


def difference(
    runner: ModelRunner,
    layout: CacheLayout,
    expected: list[Reference],
    paged: Callable[[CacheLayout], torch.Tensor],
) -> tuple[str, Exception | None]:
    """Return how `paged` differs from references, and an error; "": only by rounding."""
    for reference in expected:
        agreement, failure = attempt(partial(compare, runner, layout, reference, paged))
        if agreement is None:
            return f"its forward fails ({error_text(failure)})", failure
        if not agreement:
            name = str(reference.dtype).removeprefix("torch.")
            return f"log-probabilities in {name} are off its plain forward by {agreement}", None
    return "", None


def _refusal(runner: ModelRunner, rows: list[list[int]], differs: str) -> str:
    """Return the text of the error; `differs` says how the last batch layout differs."""
    name = type(runner.model).__name__
    if runner.is_bitwise:
        return (
            f"numerics='bitwise': {name} computes different bits with a cache than without one "
            f"({differs}); leave numerics at 'fast'."
        )
    advice, _ = attempt(lambda: _advice(runner, rows))
    advice = advice or "Use model.generate."
    return f"{name} cannot run on a paged cache: {differs}. {advice}"


def _require_same_bits(runner: ModelRunner) -> None:
    """Refuse a model whose logits' bits depend on other rows, on padding, or on threads."""
    rows = _drawn_rows(runner, LENGTHS_OF_BITS)
    longest = max(LENGTHS_OF_BITS)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [runner.plain_logits(row) for row in rows]
        offsets = (0, longest // 3, longest)
        for threads, start in itertools.product((num_threads, num_threads + 1), offsets):
            torch.set_num_threads(threads)
            # Tokens begin at `start`, or end where the longest row does.
            starts = [min(start, longest - len(row)) for row in rows]
            batch_BSV = runner.padded_logits(rows, starts)
            for logits_SV, first, logits_TV in zip(batch_BSV, starts, alone, strict=True):
                beside_TV = logits_SV[first : first + len(logits_TV)]
                if not torch.equal(beside_TV, logits_TV):
                    nats = (beside_TV - logits_TV).abs().max()
                    raise ConfigurationError(
                        f"numerics='bitwise': {type(runner.model).__name__} computes different "
                        "bits for a row in a padded batch than alone (logits differ by "
                        f"{nats:.2g}); leave numerics at 'fast'."
                    )
    finally:
        torch.set_num_threads(num_threads)


def _advice(runner: ModelRunner, rows: list[list[int]]) -> str:
    """Return sentences that say why a refused model cannot use pages, and what to do."""

    def is_same(logits_TV: torch.Tensor, expected_TV: torch.Tensor) -> bool:
        logprobs_TV = logits_TV.log_softmax(-1)
        expected_logprobs_TV = expected_TV.log_softmax(-1)
        noise = rounding_noise(expected_logprobs_TV, None, runner.rounding_dtype)
        return bool(agrees(logprobs_TV, expected_logprobs_TV, noise))

    shortest = min(map(len, rows))
    alike = [row[:shortest] for row in rows]
    alone = [runner.plain_logits(row) for row in alike]
    if not is_same(runner.plain_logits(alike[0]), alone[0]):
        return (
            "Two forwards of the same tokens differ, as they do in a diffusion model; use "
            "model.generate."
        )
    for index, row in enumerate(alike):
        others = alike[:index] + alike[index + 1 :]
        if not is_same(runner.plain_logits(row, beside=others), alone[index]):
            return (
                "Its results for a sequence depend on what else is in the forward, for example "
                "because activations are quantised together (quantize_dynamic, or "
                "llm_int8_threshold above 0); quantise only the weights, or use model.generate."
            )
    for row, logits_TV in zip(alike, alone, strict=True):
        if not is_same(runner.plain_logits(row[:1]), logits_TV[:1]):
            return (
                "It looks ahead: set is_decoder=True in its config if it is an encoder. If its "
                "prompt attends in both directions, as PaliGemma's does, its keys cannot be kept; "
                "use model.generate."
            )
    return "Use model.generate."


def text_rows(runner: ModelRunner) -> list[list[int]]:
    """Return prompts with two more tokens each, made of distinct text token ids."""
    return _drawn_rows(runner, [length + 2 for length in PROMPT_LENGTHS])


def _drawn_rows(runner: ModelRunner, lengths: Sequence[int]) -> list[list[int]]:
    """Return rows of these lengths, made of text token ids that do not repeat while they last."""
    drawn = itertools.cycle(hf_compat.text_token_ids(runner.model))
    return [list(itertools.islice(drawn, length)) for length in lengths]


def attempt(function: Callable[[], Result]) -> tuple[Result | None, Any]:
    """Return (result, None), or (None, error) if the model itself raises."""
    try:
        return function(), None
    except (ConfigurationError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - raised as the cause of a refusal
        return None, error


def _forwards(layout: CacheLayout) -> list[Forward]:
    """Return prefills, a decode of each row by itself, and one of all rows.

    A single row has different columns than in a batch, which reveals a model that uses columns as
    positions.
    """
    prompts = list(enumerate(PROMPT_LENGTHS))
    decodes = [[(row, length + 1)] for row, length in prompts]
    together = [(row, length + 2) for row, length in prompts]
    if layout.is_recurrent:
        return [prompts, *decodes, together]
    rest_of_prompts = [pair for pair in prompts if pair not in CHUNKS]
    return [CHUNKS, rest_of_prompts, *decodes, together]


def _after_each(plain: list[torch.Tensor], forwards: list[Forward]) -> torch.Tensor:
    """Return log-probabilities after each row of each forward, `[rows of all forwards, V]`."""
    rows = itertools.chain(*forwards)
    return torch.stack([plain[row][length - 1] for row, length in rows]).log_softmax(-1)


def _paged(runner: ModelRunner, rows: list[list[int]], layout: CacheLayout) -> torch.Tensor:
    """Return the log-probabilities of `_after_each`, computed with a paged cache."""
    cache, table = pages_for(runner, layout, len(rows), max(map(len, rows)))
    logits: list[torch.Tensor] = []
    num_computed = [0] * len(rows)
    for forward in _forwards(layout):
        new_tokens: list[list[int]] = []
        for row, length in forward:
            new_tokens.append(rows[row][num_computed[row] : length])
            num_computed[row] = length
        batch = ForwardBatch(
            new_tokens=new_tokens,
            lengths=[length for _, length in forward],
            table_rows=[row for row, _ in forward],
            cache=cache,
            table=table,
        )
        logits.append(runner.logits(batch))
    return torch.cat(logits).log_softmax(-1)


def pages_for(
    runner: ModelRunner, layout: CacheLayout, num_rows: int, longest: int
) -> tuple[PagedCache, BlockTable]:
    """Return a cache and a table with blocks for `num_rows` sequences of `longest` tokens."""
    blocks_per_row = -(-longest // BLOCK_SIZE)
    cache = PagedCache(
        layout,
        num_blocks=num_rows * blocks_per_row,
        block_size=BLOCK_SIZE,
        num_table_rows=num_rows,
        device=runner.device,
    )
    table = BlockTable(num_rows, BLOCK_SIZE, runner.device)
    entries: list[tuple[int, int, int]] = []
    for row in range(num_rows):
        for index in range(blocks_per_row):
            block = 1 + row * blocks_per_row + index
            entries.append((row, index, block))
    table.write(entries)
    return cache, table
