"""Log recorded sequences as a Weights & Biases table, and histograms of tokens.

The only file that imports wandb. Owns the table's name and columns; does not start, configure or
finish a run. Called from the thread that trains.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import wandb

from cb_rollout.metrics.run_records import SequenceRecord, TokenRow

TABLE_NAME = "rollout/tokens"

# The ids of the tokens are in the run's records.
COLUMNS = ("step", "request_id", *(name for name in TokenRow._fields if name != "token_id"))

# Every row repeats the prompt of its sequence. Its end is kept, because chat templates begin alike.
MAX_PROMPT_CHARACTERS = 500


def log_token_table(records: Iterable[SequenceRecord], step: int) -> None:
    """Log every token of the trainer's global `step` as one row of the table "rollout/tokens".

    The table joins the row that the trainer logs next; if several precede that row, wandb keeps the
    last. Without an active run, or without records, nothing is logged.
    """
    if wandb.run is None:
        return
    rows: list[Any] = []
    for record in records:
        request_id = _encodable(record.request_id)
        prompt = _encodable(record.prompt)
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            prompt = "..." + prompt[-MAX_PROMPT_CHARACTERS:]
        for token_row in record.token_rows():
            values = token_row._asdict()
            values["step"] = step
            values["request_id"] = request_id
            values["prompt"] = prompt
            values["token"] = _encodable(token_row.token)
            rows.append([values[name] for name in COLUMNS])
    if rows:
        wandb.run.log({TABLE_NAME: wandb.Table(columns=list(COLUMNS), data=rows)}, commit=False)


def log_histograms(histograms: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Log histograms, as counts and edges by name, into the row that the trainer logs next.

    Without an active run, or without a histogram, nothing is logged.
    """
    if wandb.run is None or not histograms:
        return
    logged: dict[str, wandb.Histogram] = {}
    for name, counts_and_edges in histograms.items():
        logged[name] = wandb.Histogram(np_histogram=counts_and_edges)
    wandb.run.log(logged, commit=False)


def end_row(begun_at: int | None) -> int | None:
    """Commit wandb's row if it is still that of step `begun_at`; return the step of the next row.

    A trainer logs a row after each table. Your own loop may log none: then the tables of all its
    steps would be in one row, and wandb would keep the last table. `begun_at` is None before the
    first row; None is returned if there is no active run.
    """
    if wandb.run is None:
        return None
    if wandb.run.step == begun_at:
        wandb.run.log({}, commit=True)
    return wandb.run.step


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
