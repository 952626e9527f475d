"""Save in a checkpoint what one process needs to resume exactly: draws, groups, current batch.

Owns the file of each process beside the trainer's own files, and the form of a batch in it. A file
is read whole or not at all. The order of a trainer's rows needs no saved state. Called by the
trainer, on its thread.
"""

import io
import math
import pickle
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.serialization import default_restore_location

from cb_rollout.errors import error_text
from cb_rollout.integrations.trl import upstream
from cb_rollout.integrations.trl.rows.loss_rows import ROWS_KEY, LossRow
from cb_rollout.metrics.jsonl import write_whole
from cb_rollout.types import FinishReason

FILE_NAME = "cb_rollout_{rank:05}.pt"
# Version of the layout of the file.
FORMAT = 1
# Key of the trainer's batch: a generation that several steps train on.
BATCH = "batch"

# Settings of a trainer that determine a process's share of a generation.
_SHARES = ("generation_batch_size", "steps_per_generation", "per_device_train_batch_size")

# Errors of `torch.load`, and of reading a file with other contents.
_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, pickle.UnpicklingError),
    *(KeyError, TypeError, ValueError),
)

State = dict[str, Any]


def write_process_state(folder: str | Path, trainer: Any, state: Mapping[str, Any]) -> None:
    """Write the state of this process into a checkpoint's folder.

    Raises:
        OSError: the file cannot be written.
    """
    file = io.BytesIO()
    torch.save({"header": _header(trainer), **state}, file)
    write_whole(_path(folder, trainer), file.getvalue())


def read_process_state(folder: str | Path, trainer: Any) -> State:
    """Return the state that this process wrote; {}: there is none that this run can resume.

    If there is a file, a warning gives the reason.
    """
    path = _path(folder, trainer)
    if not path.is_file():
        return {}
    device = str(trainer.accelerator.device)

    def restored(storage: Any, location: str) -> Any:
        return default_restore_location(storage, "cpu" if location == "cpu" else device)

    try:
        state = dict(torch.load(path, weights_only=True, map_location=restored))
        found = state.pop("header")
    except _UNREADABLE as error:
        reason = f"cannot be read ({error_text(error)})"
    else:
        expected = _header(trainer)
        differing = [name for name in expected if found.get(name) != expected[name]]
        if not differing:
            return state
        name = differing[0]
        reason = f"is of {name}={found.get(name)!r}, and now it is {expected[name]!r}"
    warnings.warn(
        f"{path} {reason}: what was half done at the checkpoint begins anew, and draws differ "
        "from those of the run that was stopped.",
        stacklevel=2,
    )
    return {}


def _path(folder: str | Path, trainer: Any) -> Path:
    return Path(folder) / FILE_NAME.format(rank=trainer.accelerator.process_index)


def _header(trainer: Any) -> State:
    header = {"format": FORMAT, "num_processes": trainer.accelerator.num_processes}
    for name in ("num_generations", "num_iterations"):
        header[name] = getattr(trainer, name, None)
    for name in _SHARES:
        header[name] = getattr(trainer.args, name, None)
    return header


def saved_batch(trainer: Any) -> State:
    """Return the generation that a GRPO or RLOO trainer is training on, and its position in it.

    {}: the next step generates anew, the batch contains objects that cannot be saved, or the
    trainer is of another class.
    """
    if not isinstance(trainer, upstream.GRPOTrainer | upstream.RLOOTrainer):
        return {}
    batches = trainer._buffered_inputs
    if batches is None or not trainer._step % _num_forwards(trainer):
        return {}
    saved: list[State] = []
    for batch in batches:
        plain: State = dict(batch)
        if ROWS_KEY in plain:
            plain[ROWS_KEY] = [_saved_row(row) for row in plain[ROWS_KEY]]
        if not _is_plain(plain):
            return {}
        saved.append(plain)
    return {BATCH: {"trainer_step": trainer._step, "inputs": saved}}


def restore_batch(trainer: Any, state: Mapping[str, Any]) -> None:
    """Resume the generation of `saved_batch`, if there is one."""
    if BATCH not in state or trainer.args.ignore_data_skip:
        return
    batches: list[State] = []
    for saved in state[BATCH]["inputs"]:
        batch = dict(saved)
        if ROWS_KEY in batch:
            batch[ROWS_KEY] = [_restored_row(row) for row in batch[ROWS_KEY]]
        batches.append(batch)
    trainer._buffered_inputs = batches
    trainer._step = state[BATCH]["trainer_step"]


def skip_passes(trainer: Any, loader: Any) -> None:
    """Move a loader's sampler past the passes that the stopped training had finished.

    TRL 1.16's sampler draws the order of each pass from one generator. transformers 5.23 skips only
    the trained part of the current pass, which would then get the order of the first pass.

    Args:
        trainer: a trainer that has loaded a checkpoint, and trains next.
        loader: yields the trainer's batches; it has yielded none so far.
    """
    sampler = getattr(loader, "batch_sampler", None)
    while sampler is not None and not isinstance(sampler, upstream.utils.RepeatSampler):
        # The sampler of a process's share wraps a sampler of batches, which wraps one of rows.
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner
    if sampler is None or trainer.args.ignore_data_skip:
        return
    num_steps = math.ceil(len(loader) / trainer.args.gradient_accumulation_steps)
    for _ in range(trainer.state.global_step // max(num_steps, 1)):
        next(iter(sampler), None)


def _num_forwards(trainer: Any) -> int:
    """Return the number of forwards that use one generation (TRL 1.16)."""
    return trainer.args.steps_per_generation * trainer.num_iterations


def _saved_row(row: LossRow) -> State:
    state = {field.name: getattr(row, field.name) for field in fields(row)}
    if row.finish_reason is not None:
        state["finish_reason"] = row.finish_reason.value
    if row.sampling_mask is not None:
        state["sampling_mask"] = [list(ids) for ids in row.sampling_mask]
    if row.routes is not None:
        state["routes"] = torch.from_numpy(row.routes.copy())
    return state


def _restored_row(state: Mapping[str, Any]) -> LossRow:
    values = dict(state)
    if values["finish_reason"] is not None:
        values["finish_reason"] = FinishReason(values["finish_reason"])
    if values["sampling_mask"] is not None:
        values["sampling_mask"] = [array("i", ids) for ids in values["sampling_mask"]]
    if values["routes"] is not None:
        values["routes"] = values["routes"].numpy()
    return LossRow(**values)


def _is_plain(value: Any) -> bool:
    """Return whether `torch.load(weights_only=True)` reads a value."""
    if value is None or type(value) in (bool, int, float, str, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return all(_is_plain(item) for item in [*value.keys(), *value.values()])
    if isinstance(value, Sequence):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return False
