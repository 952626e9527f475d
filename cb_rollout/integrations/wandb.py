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
    """Log every token of the trainer's global `step` as one row of the table "rollout/tokens".

    The table joins the row that the trainer logs next; of several before that row, wandb keeps the
    last. Without an active run, or without records, nothing is logged.
    """
    if wandb.run is None:
        return
    rows: list[Any] = []
    for record in records:
        request_id, prompt = _encodable(record.request_id), _encodable(record.prompt)
        if len(prompt) > MAX_PROMPT_CHARACTERS:
            prompt = "..." + prompt[-MAX_PROMPT_CHARACTERS:]
        for row in record.token_rows():
            figures = row._replace(prompt=prompt, token=_encodable(row.token))._asdict()
            rows.append([step, request_id, *(figures[name] for name in COLUMNS[2:])])
    if rows:
        wandb.run.log({TABLE_NAME: wandb.Table(columns=list(COLUMNS), data=rows)}, commit=False)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
