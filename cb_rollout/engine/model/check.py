"""Check that a model computes on pages what its own plain forward computes, or refuse it.

Chooses the batch layout and the attention backend. In float32 at least, log-probabilities show a
model that looks ahead, counts positions in its own way, or keeps its past elsewhere; in the model's
own precision, an engine that rounds otherwise.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.attention.selector import BackendSelection, select_backend
from cb_rollout.engine.kv_cache.forward_batch import ForwardBatch
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import BlockTable, PagedCache
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
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
# Its rows begin, with two lengths; in the next forward a row continues beside others that begin.
CHUNKS = ((1, 4), (3, 5))

# Rows whose bits are compared: more than a vector, and no multiple of one.
LENGTHS_OF_BITS = (3, 38, 1, 17, 30)

# Small, so that every row has several blocks.
BLOCK_SIZE = 4

Result = TypeVar("Result")

Forward = Sequence[tuple[int, int]]
"""The rows of one forward, each with the number of its tokens that are computed after it."""


def check_model(runner: ModelRunner) -> CacheLayout:
    """Return the cache layout, and set the runner's batch layout and attention backend.

    Raises `ConfigurationError` if the model agrees with its plain forward under no batch layout.
    """
    name = type(runner.model).__name__
    rows = text_rows(runner)
    runner.attention_backend = None
    with eval_mode(runner.model):
        plain, failure = attempt(lambda: [runner.plain_logits(row) for row in rows])
        if plain is None:
            raise ConfigurationError(
                f"{name} does not run on token ids alone ({error_text(failure)}); load a "
                "decoder-only language model, or use model.generate."
            ) from failure
        layout, failure = attempt(runner.probe)
        if layout is None:
            layout, _ = attempt(runner.probe_opaque_states)
        if layout is None:
            raise ConfigurationError(
                f"{name} does not take transformers' own cache ({error_text(failure)}); roll it "
                "out with model.generate."
            ) from failure
        if any(logits_TV.isnan().any() for logits_TV in plain):
            # Diverged weights show nothing about pages; the sampler refuses their tokens.
            return layout
        if runner.is_bitwise:
            _require_same_bits(runner)
        found, expected = "", _references(runner, layout, rows, plain)
        for runner.batch_layout in BatchLayout:
            if runner.batch_layout is BatchLayout.PACKED and layout.packing_obstacle:
                runner.packing_obstacle = layout.packing_obstacle
                continue
            paged = partial(_paged, runner, rows)
            found, failure = difference(runner, layout, expected, paged)
            if runner.batch_layout is BatchLayout.PACKED:
                runner.packing_obstacle = found
            if not found:
                runner.backend_selection = _set_backend(runner, layout, rows, expected)
                return layout
        refusal = _refusal(runner, rows, found)
    raise ConfigurationError(refusal) from failure


def _references(
    runner: ModelRunner, layout: CacheLayout, rows: list[list[int]], plain: list[torch.Tensor]
) -> list[Reference]:
    expected, dtype = _after_each(plain, _forwards(layout)), runner.rounding_dtype
    if runner.is_bitwise:
        return [Reference(expected, torch.zeros(len(expected)), dtype, is_higher=False)]
    return references(
        lambda: _after_each([runner.plain_logits(row) for row in rows], _forwards(layout)),
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
    own = layout.at_least(reference.dtype) if reference.is_higher else layout
    return reference.compare(partial(paged, own), runner.computing_in)


def difference(
    runner: ModelRunner,
    layout: CacheLayout,
    expected: list[Reference],
    paged: Callable[[CacheLayout], torch.Tensor],
) -> tuple[str, Exception | None]:
    """Return how `paged` differs from references, and an error; "": by rounding alone."""
    for reference in expected:
        agreement, failure = attempt(partial(compare, runner, layout, reference, paged))
        if agreement is None:
            return f"its forward fails ({error_text(failure)})", failure
        if not agreement:
            name = str(reference.dtype).removeprefix("torch.")
            return f"log-probabilities in {name} are off its plain forward by {agreement}", None
    return "", None


def _refusal(runner: ModelRunner, rows: list[list[int]], found: str) -> str:
    name = type(runner.model).__name__
    if runner.is_bitwise:
        return (
            f"numerics='bitwise': {name} computes other bits from its cache than without one "
            f"({found}); leave numerics at 'fast'."
        )
    advice = attempt(lambda: _advice(runner, rows))[0] or "Roll"
    return f"{name} cannot run on a paged cache: {found}. {advice} it out with model.generate."


def _require_same_bits(runner: ModelRunner) -> None:
    """Refuse a model whose logits are other bits beside other rows, padded, or by other threads."""
    drawn = itertools.cycle(hf_compat.text_token_ids(runner.model))
    rows = [[next(drawn) for _ in range(length)] for length in LENGTHS_OF_BITS]
    longest, num_threads = max(LENGTHS_OF_BITS), torch.get_num_threads()
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
                        f"numerics='bitwise': {type(runner.model).__name__} computes other bits for"
                        f" a row in a padded batch than alone (logits differ by {nats:.2g}); leave"
                        " numerics at 'fast'."
                    )
    finally:
        torch.set_num_threads(num_threads)


def _advice(runner: ModelRunner, rows: list[list[int]]) -> str:
    def is_same(logits_TV: torch.Tensor, expected_TV: torch.Tensor) -> bool:
        found, expected = (logits.log_softmax(-1) for logits in (logits_TV, expected_TV))
        noise = rounding_noise(expected, None, runner.rounding_dtype)
        return bool(agrees(found, expected, noise))

    alike = [row[: min(map(len, rows))] for row in rows]
    alone = [runner.plain_logits(row) for row in alike]
    if not is_same(runner.plain_logits(alike[0]), alone[0]):
        return "Two forwards of the same tokens differ, as those of a diffusion model do; roll"
    for index, row in enumerate(alike):
        others = alike[:index] + alike[index + 1 :]
        if not is_same(runner.plain_logits(row, beside=others), alone[index]):
            return (
                "What it computes for a sequence depends on what else is in the forward, as where "
                "activations are quantised together (quantize_dynamic, or llm_int8_threshold above "
                "0); quantise only the weights, or roll"
            )
    for row, logits_TV in zip(alike, alone, strict=True):
        if not is_same(runner.plain_logits(row[:1]), logits_TV[:1]):
            return (
                "It looks ahead: set is_decoder=True in its config if it is an encoder; if its "
                "prompt attends both ways, as PaliGemma's, its keys cannot be kept, so roll"
            )
    return "Roll"


def _set_backend(
    runner: ModelRunner, layout: CacheLayout, rows: list[list[int]], expected: list[Reference]
) -> BackendSelection:
    is_padded = runner.batch_layout.takes_any_lengths and runner.opaque_states is None
    choice = select_backend(runner.device, layout, is_padded=is_padded)
    if choice.backend is None:
        return choice
    for reference in expected:
        own = layout.at_least(reference.dtype) if reference.is_higher else layout
        if reference.is_higher and choice.backend.obstacle(runner.device, own):
            # Compared in the model's own precision alone.
            continue
        runner.attention_backend = choice.backend(own, runner.device)
        with devices.current(runner.device):
            found, _ = difference(runner, layout, [reference], partial(_paged, runner, rows))
        if found:
            runner.attention_backend = None
            return BackendSelection(None, f"it is not the model's own attention: {found}")
    return choice


def text_rows(runner: ModelRunner) -> list[list[int]]:
    """Return prompts and two more tokens each, of distinct ids that stand for text."""
    drawn = itertools.cycle(hf_compat.text_token_ids(runner.model))
    return [[next(drawn) for _ in range(length + 2)] for length in PROMPT_LENGTHS]


def attempt(function: Callable[[], Result]) -> tuple[Result | None, Any]:
    """Return (result, None), or (None, error) where the model itself raises."""
    try:
        return function(), None
    except (ConfigurationError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - raised as the cause of a refusal
        return None, error


def _forwards(layout: CacheLayout) -> list[Forward]:
    """Return prefills, a decode of each row by itself, and one of all rows.

    A row by itself has other columns, which shows a model that takes columns for positions.
    """
    lengths = list(enumerate(PROMPT_LENGTHS))
    decodes = [[(row, length + 1)] for row, length in lengths]
    together = [(row, length + 2) for row, length in lengths]
    if layout.is_recurrent:
        return [lengths, *decodes, together]
    return [CHUNKS, [pair for pair in lengths if pair not in CHUNKS], *decodes, together]


def _after_each(plain: list[torch.Tensor], forwards: list[Forward]) -> torch.Tensor:
    """Return log-probabilities after each row of each forward, `[rows of all forwards, V]`."""
    rows = itertools.chain(*forwards)
    return torch.stack([plain[row][length - 1] for row, length in rows]).log_softmax(-1)


def _paged(runner: ModelRunner, rows: list[list[int]], layout: CacheLayout) -> torch.Tensor:
    """Return the same as `_after_each`, on pages."""
    cache, table = pages_for(runner, layout, len(rows), max(map(len, rows)))
    logits: list[torch.Tensor] = []
    num_computed = [0] * len(rows)
    for forward in _forwards(layout):
        table_rows, lengths = zip(*forward, strict=True)
        new_tokens = [rows[row][num_computed[row] : length] for row, length in forward]
        logits.append(runner.logits(ForwardBatch(new_tokens, lengths, table_rows, cache, table)))
        for row, length in forward:
            num_computed[row] = length
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
    entries = itertools.product(range(num_rows), range(blocks_per_row))
    table.write([(row, index, 1 + row * blocks_per_row + index) for row, index in entries])
    return cache, table
