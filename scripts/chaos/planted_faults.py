"""Plant faults into the engine's forwards, and say by which margin the model check finds each.

Usage: python scripts/chaos/planted_faults.py [--model FOLDER] [--write docs/numerics.md]

A margin of 1 is the border: below it a fault passes, above it a right engine would be refused. The
last row is the engine without a fault.
"""

import argparse
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from cb_rollout.engine.attention.decode_cache import UnsupportedAttentionError
from cb_rollout.engine.attention.packed import PackedAttention, Segment
from cb_rollout.engine.kv_cache.layout import CacheLayout
from cb_rollout.engine.kv_cache.paged import PagedCache, PagedLayer
from cb_rollout.engine.model import check
from cb_rollout.engine.model import runner as runner_module
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.runner import BatchLayout, ModelRunner
from cb_rollout.engine.numerics.agreement import LARGEST_MULTIPLE, TYPICAL_MULTIPLE, Agreement

NONE = "none"

BEGIN, END = "<!-- planted faults -->", "<!-- end of planted faults -->"

Run = Callable[..., Any]


def _late_position(run: Run, runner: ModelRunner, ids: torch.Tensor, arguments: Any) -> Any:
    """Give each decoded token the position after its own."""
    if ids.shape[1] == 1 and arguments.get("position_ids") is not None:
        arguments = arguments | {"position_ids": arguments["position_ids"] + 1}
    return run(ids, arguments)


def _looking_ahead(run: Run, runner: ModelRunner, ids: torch.Tensor, arguments: Any) -> Any:
    """Mix a hundredth of the next token's embedding into each one of a prompt."""

    def mix(_module: Any, _inputs: Any, states: torch.Tensor) -> torch.Tensor:
        mixed = states.clone()
        mixed[:, :-1] += 0.01 * (states[:, 1:] - states[:, :-1])
        return mixed

    handle: Any = runner.model.get_input_embeddings().register_forward_hook(mix)
    try:
        return run(ids, arguments)
    finally:
        handle.remove()


def _older_layer(run: Run, runner: ModelRunner, ids: torch.Tensor, arguments: Any) -> Any:
    """Run one layer with weights that are a hundredth off."""
    weights = [p for name, p in runner.model.named_parameters() if ".0." in name and p.dim() > 1]
    own = [weight.detach().clone() for weight in weights]
    try:
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.01)
        return run(ids, arguments)
    finally:
        with torch.no_grad():
            for weight, value in zip(weights, own, strict=True):
                weight.copy_(value)


def _coarse_head(run: Run, runner: ModelRunner, ids: torch.Tensor, arguments: Any) -> Any:
    """Round the head's inputs to float8."""

    def coarse(_module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.to(torch.float8_e4m3fn).to(value.dtype) for value in inputs)

    head: Any = runner.model.get_output_embeddings()
    handle = head.register_forward_pre_hook(coarse)
    try:
        return run(ids, arguments)
    finally:
        handle.remove()


OF_FORWARDS = {
    "a decoded token's position is one too high": _late_position,
    "prompts look ahead, by a hundredth": _looking_ahead,
    "one layer's weights are 1% off": _older_layer,
    "the head's inputs are rounded to float8": _coarse_head,
}


def _stale_key(cache: PagedCache) -> None:
    """Leave the key of another token in the slot of the first row's second one."""
    slot = check.BLOCK_SIZE + 1
    for layer in _paged(cache)[:1]:
        layer.pages[0][slot] = layer.pages[0][slot - 1]


def _neighbours_key(cache: PagedCache) -> None:
    """Put a key of the second row into the first one, in one layer."""
    slot, blocks = check.BLOCK_SIZE + 1, -(-(max(check.PROMPT_LENGTHS) + 2) // check.BLOCK_SIZE)
    for layer in _paged(cache)[:1]:
        layer.pages[0][slot] = layer.pages[0][slot + blocks * check.BLOCK_SIZE]


def _neighbours_state(cache: PagedCache) -> None:
    """Give the first row the second one's recurrent state, in one layer."""
    for layer in list(cache.stateful.values())[:1]:
        for states in layer.tensors:
            states[0] = states[1]


def _paged(cache: PagedCache) -> list[PagedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, PagedLayer)]


OF_CACHES = {
    "a stale key in one layer": _stale_key,
    "a key of a neighbour in one layer": _neighbours_key,
    "a recurrent state of a neighbour in one layer": _neighbours_state,
}

OF_SEGMENTS: dict[str, Callable[[Segment], Segment]] = {
    "a history is read from one key too early": lambda s: s._replace(
        prefix=tuple(range(n := max(0, own.start - 1), n + len(own)) for own in s.prefix)
    ),
    "a query sees a key of the row before": lambda s: s._replace(
        key_start=max(0, (s.start if s.key_start is None else s.key_start) - 1)
    ),
}

FAULTS = (*OF_FORWARDS, *OF_CACHES, *OF_SEGMENTS)


def applies(fault: str, layout: CacheLayout, batch_layout: BatchLayout) -> bool:
    """Return whether a model that is run in this way can have the fault."""
    if fault in OF_SEGMENTS:
        return batch_layout is BatchLayout.PACKED
    if fault in OF_CACHES:
        return layout.is_recurrent if "state" in fault else layout.has_keys
    return True


@contextmanager
def planted(fault: str, runner: ModelRunner) -> Iterator[None]:
    """Plant a fault into a runner's forwards on pages; its plain forwards stay right."""
    own_run, own_begin, own_attention = runner._run, PagedCache.begin, runner_module.PackedAttention

    def run(ids: torch.Tensor, arguments: dict[str, Any], model: Any = None) -> Any:
        if runner._cache_argument in arguments and fault in OF_FORWARDS:
            return OF_FORWARDS[fault](own_run, runner, ids, arguments)
        return own_run(ids, arguments, model)

    def begin(cache: PagedCache, mapping: Any) -> None:
        if fault in OF_CACHES and mapping.read_slots_BS is not None:
            OF_CACHES[fault](cache)
        own_begin(cache, mapping)

    def attention(segments: Any, device: torch.device, **named: Any) -> PackedAttention:
        if fault in OF_SEGMENTS:
            segments = list(map(OF_SEGMENTS[fault], segments))
        return PackedAttention(segments, device, **named)

    runner._run = run
    PagedCache.begin = begin
    runner_module.PackedAttention = attention
    try:
        yield
    finally:
        runner._run = own_run
        PagedCache.begin = own_begin
        runner_module.PackedAttention = own_attention


def margins(
    model: Any, autocast_dtype: torch.dtype | None = None, faults: Sequence[str] = FAULTS
) -> dict[str, float]:
    """Return, by fault, its distance as a share of what is allowed.

    Under 1: the fault passes. `NONE` is the engine without a fault.
    """
    runner = ModelRunner(model, autocast_dtype)
    rows = check.text_rows(runner)
    with eval_mode(model):
        checked = check.check_model(runner)
        layout = checked.layout
        runner.use(replace(checked.execution, attention_backend=None))
        expected = check._references(
            runner, layout, rows, [runner.plain_logits(row) for row in rows]
        )
        found = {}
        for fault in (*faults, NONE):
            if not applies(fault, layout, runner.batch_layout):
                continue
            with planted(fault, runner):
                try:
                    paged = partial(check._paged, runner, rows)
                    agreements = [
                        check.compare(runner, layout, reference, paged) for reference in expected
                    ]
                except UnsupportedAttentionError:
                    # The engine's own count of keys refuses it.
                    found[fault] = math.inf
                    continue
            found[fault] = max(map(_margin, agreements))
    return found


def _margin(agreement: Agreement) -> float:
    return max(
        agreement.typical_multiple / TYPICAL_MULTIPLE,
        agreement.largest_multiple / LARGEST_MULTIPLE,
    )


def main() -> None:
    """Print the margins of one model in float32, in bfloat16, and under autocast."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder of a checkpoint; SmolLM2-135M-Instruct otherwise")
    parser.add_argument("--write", type=Path, help="write the table into this document")
    options = parser.parse_args()

    from smollm2 import smollm2_folder

    folder = options.model or smollm2_folder()
    columns = {}
    for name, dtype, autocast in (
        ("float32", torch.float32, None),
        ("bfloat16", torch.bfloat16, None),
        ("bfloat16 autocast", torch.float32, torch.bfloat16),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        columns[name] = margins(model, autocast)
    lines = [f"| fault | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for fault in next(iter(columns.values())):
        shares = (_words(column[fault]) for column in columns.values())
        lines.append(f"| {fault} | {' | '.join(shares)} |")
    name = Path(folder).name
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines.append(f"\n<sub>{name}, {platform.machine()}, {date.today()}; {versions}.</sub>")
    print(table := "\n".join(lines))
    if options.write:
        before, rest = options.write.read_text().split(BEGIN)
        _, after = rest.split(END)
        options.write.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def _words(share: float) -> str:
    return "refused by itself" if share == math.inf else f"{share:,.3g}"


if __name__ == "__main__":
    main()
