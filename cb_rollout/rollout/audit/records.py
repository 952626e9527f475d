"""Read recorded rollouts: records of a run, JSON lines, and answers of OpenAI's protocol.

Owns the names of the fields. Prompts that were recorded as text are tokenised here.
"""

import math
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from cb_rollout.errors import ConfigurationError, abbreviated
from cb_rollout.metrics.jsonl import read_records
from cb_rollout.metrics.run_records import chosen_run, iterate_rollouts, list_runs
from cb_rollout.rollout.prompts import encoded
from cb_rollout.types import GenerationOutput

# Names of one field, in the order in which they are looked for.
PROMPT_IDS = ("prompt_ids", "prompt_token_ids")
PROMPT = ("prompt", "messages")
TOKENS = ("generated_tokens", "completion_ids", "token_ids", "output_ids")
LOGPROBS = ("logprobs", "sampling_logprobs", "output_token_logprobs")


def read_rollouts(
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    run_id: str | None = None,
    step: int | None = None,
    temperature: float = 1.0,
) -> list[GenerationOutput]:
    """Return the recorded sequences that have log-probabilities.

    `path` is a trainer's output_dir or the records in it, or a file of JSON lines. A line is a row
    of `cb-rollout generate --logprobs`, any object with prompt, token ids and numbers, or an OpenAI
    answer with token ids. `tokenizer` encodes prompts that are text or chats. None: the last run of
    a directory, and its last step with sequences. `temperature` is of lines that do not say theirs.
    `ConfigurationError`: there are no such sequences, or a line is none.
    """
    if not Path(path).exists():
        raise ConfigurationError(f"{path} does not exist; name a run's directory or a file.")
    if Path(path).is_dir():
        run = chosen_run(list_runs(path), run_id)
        step = max(run.num_sequences, default=0) if step is None else step
        if run.num_sequences and step not in run.num_sequences:
            steps = abbreviated([str(own) for own in sorted(run.num_sequences)])
            raise ConfigurationError(f"{path} has no sequence of step {step}, but of {steps}.")
        outputs = [
            GenerationOutput(
                record.request_id,
                # The record's text holds its special tokens.
                tokenizer(text=record.prompt, add_special_tokens=False)["input_ids"],
                record.token_ids,
                record.logprobs,
                temperature=temperature,
            )
            for record in iterate_rollouts(path, run, {step})
            if record.logprobs and all(map(math.isfinite, record.logprobs))
        ]
    else:
        numbers = count(1)

        def parse(row: Mapping[str, Any]) -> list[GenerationOutput]:
            return _of_line(row, f"line {next(numbers)}", tokenizer, temperature)

        lines = read_records(Path(path), parse, "rollout", is_complete=True)
        outputs = [own for line in lines for own in line]
    if not outputs:
        raise ConfigurationError(
            f"{path} holds no sequence with token ids and log-probabilities; record some "
            "(record_num_sequences, or cb-rollout generate --logprobs)."
        )
    return outputs


def _of_line(
    row: Mapping[str, Any], line: str, tokenizer: Any, temperature: float
) -> list[GenerationOutput]:
    """Return the sequences of one line: one, or a choice each of an OpenAI answer."""
    outputs = []
    for index, choice in enumerate(row.get("choices", [row])):
        own = {**row, **choice}
        tokens, logprobs = _first(own, TOKENS), _numbers(_first(own, LOGPROBS))
        if tokens and logprobs:
            ids: Any = _first(own, PROMPT_IDS)
            ids = encoded([_first(own, PROMPT)], tokenizer)[0] if ids is None else ids
            name = str(own.get("request_id", own.get("id", line)))
            name = f"{name}-{own.get('sample', index)}"
            used = own.get("temperature", temperature)
            outputs.append(GenerationOutput(name, list(ids), tokens, logprobs, temperature=used))
    return outputs


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _numbers(logprobs: Any) -> list[float]:
    """Return log-probabilities from a list, or from OpenAI's forms for completions and chats."""
    if isinstance(logprobs, Mapping):
        logprobs = logprobs.get("token_logprobs") or logprobs.get("content")
    numbers = []
    for own in logprobs or ():
        # A chat's token is an object; SGLang's is (number, token id, text).
        number = own["logprob"] if isinstance(own, Mapping) else own
        numbers.append(float(number[0] if isinstance(number, list) else number))
    return numbers
