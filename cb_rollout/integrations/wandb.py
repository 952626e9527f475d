"""Recorded sequences as a Weights & Biases table. The only file that imports wandb.

Owns the table's name and columns; does not start, configure or finish a run. Called from the thread
that trains.
"""

from collections.abc import Iterable
from typing import Any

import wandb

from cb_rollout.metrics.run_records import SequenceRecord, TokenRow

TABLE_NAME = "rollout/tokens"

# The ids of the tokens are in the run's records.
COLUMNS = ("step", "request_id", *(name for name in TokenRow._fields if name != "token_id"))

# The prompt is in every row of its sequence; its end is kept, since chat templates begin alike.
MAX_PROMPT_CHARACTERS = 500


def log_token_table(records: Iterable[SequenceRecord], step: int) -> None:
    """Log every token of `records` as one row of the table "rollout/tokens".

    The table joins the row that the trainer logs next, so wandb's own step counter moves only when
    the trainer moves it. Of several tables before that row, wandb keeps the last. Without an active
    run, or without records, nothing is logged.

    Args:
        records: the sequences, all of one step.
        step: the trainer's global step, the table's first column.
    """
    if wandb.run is None:
        return
    rows: list[Any] = []
    for record in records:
        request_id, prompt = _encodable(record.request_id), _shortened(_encodable(record.prompt))
        for row in record.token_rows():
            figures = row._replace(prompt=prompt, token=_encodable(row.token))._asdict()
            rows.append([step, request_id, *(figures[name] for name in COLUMNS[2:])])
    if rows:
        wandb.run.log({TABLE_NAME: wandb.Table(columns=list(COLUMNS), data=rows)}, commit=False)


def _shortened(prompt: str) -> str:
    if len(prompt) <= MAX_PROMPT_CHARACTERS:
        return prompt
    return "..." + prompt[-MAX_PROMPT_CHARACTERS:]


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
