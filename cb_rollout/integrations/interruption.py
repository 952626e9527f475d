"""End an interrupted training with a few lines: where it was, its records, and how to resume.

Called by an attached trainer's `train`, on its thread.
"""

import sysconfig
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from cb_rollout.metrics.run_records import METRICS_FILE, RUN_DIR_NAME

# Files below these folders are not the user's.
INSTALLED = ("site-packages", "dist-packages")
FOLDERS = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))


def ending_in_few_lines(
    trainer: Any, train: Callable[..., Any], write_records: Callable[[], None]
) -> Callable[..., Any]:
    """Return `train` with a `KeyboardInterrupt` that says what remains, without inner frames.

    Args:
        trainer: a transformers trainer; call this in its main process.
        train: the trainer's method.
        write_records: writes data that was recorded but not written yet.
    """

    @wraps(train)
    def train_or_say(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        except KeyboardInterrupt as interrupt:
            write_records()
            text = interruption_text(trainer, interrupt)
        raise KeyboardInterrupt(text) from None

    return train_or_say


def interruption_text(trainer: Any, interrupt: BaseException) -> str:
    """Say at which step and line a training was interrupted, and what remains of it."""
    state, args = trainer.state, trainer.args
    lines = [
        f"training was interrupted after {state.global_step:,} of {state.max_steps:,} steps, "
        f"in {_place(interrupt)}."
    ]
    run_dir = Path(args.output_dir) / RUN_DIR_NAME
    if (run_dir / METRICS_FILE).is_file():
        command = f"cb-rollout report {args.output_dir}"
        lines.append(f"Its records are in {run_dir}; {command} shows them.")
    checkpoint = _last_checkpoint(args.output_dir)
    if checkpoint is not None:
        lines.append(
            f"Its last checkpoint is {checkpoint}; trainer.train(resume_from_checkpoint=True) "
            "continues from there."
        )
    else:
        lines.append(
            f"It saved no checkpoint (save_strategy={str(args.save_strategy.value)!r}, "
            f"save_steps={args.save_steps:g}), so it cannot be resumed. To save checkpoints, set "
            "save_strategy='steps' and a smaller save_steps."
        )
    return "\n".join(lines)


def _last_checkpoint(output_dir: str) -> str | None:
    return get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None


def _place(interrupt: BaseException) -> str:
    """Name the innermost line of the user's own code below `train`, else the innermost of all."""
    frames = traceback.extract_tb(interrupt.__traceback__)
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    frame = own[-1] if own else frames[-1]
    return f"{frame.name} ({Path(frame.filename).name}, line {frame.lineno})"


def _is_own(path: Path) -> bool:
    is_installed = any(part in INSTALLED for part in path.parts)
    return not is_installed and not any(folder in path.parents for folder in FOLDERS)
