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

# Names of each field, in the order in which they are tried.
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

    Args:
        path: a trainer's output_dir or the records in it, or a file of JSON lines. A line is a row
            of `cb-rollout generate --logprobs`, any object with prompt, token ids and
            log-probabilities, or an OpenAI answer with token ids.
        tokenizer: encodes prompts that are text or chats.
        run_id: a run of the directory; None: the last run.
        step: a step of the run; None: the last step with sequences.
        temperature: the temperature of sequences whose records name none.

    Raises:
        ConfigurationError: `path` does not exist, has no such sequence, or has a line that cannot
            be read.
    """
    if not Path(path).exists():
        raise ConfigurationError(f"{path} does not exist; name a run's directory or a file.")
    if Path(path).is_dir():
        outputs = _outputs_of_run(path, tokenizer, run_id, step, temperature)
    else:
        outputs = _outputs_of_file(Path(path), tokenizer, temperature)
    if not outputs:
        raise ConfigurationError(
            f"{path} holds no sequence with token ids and log-probabilities; record some "
            "(record_num_sequences, or cb-rollout generate --logprobs)."
        )
    return outputs


def _outputs_of_run(
    run_dir: str | os.PathLike[str],
    tokenizer: Any,
    run_id: str | None,
    step: int | None,
    temperature: float,
) -> list[GenerationOutput]:
    """Return the sequences of a step of a run.

    Args:
        run_dir: the folder of the run's records.
        tokenizer: encodes the prompts, which are recorded as text.
        run_id: see `read_rollouts`.
        step: see `read_rollouts`.
        temperature: see `read_rollouts`.
    """
    run = chosen_run(list_runs(run_dir), run_id)
    if step is None:
        step = max(run.num_sequences, default=0)
    if run.num_sequences and step not in run.num_sequences:
        steps = abbreviated([str(recorded) for recorded in sorted(run.num_sequences)])
        raise ConfigurationError(f"{run_dir} has no sequence of step {step}, but of {steps}.")
    outputs: list[GenerationOutput] = []
    for record in iterate_rollouts(run_dir, run, {step}):
        if not record.logprobs or not all(map(math.isfinite, record.logprobs)):
            continue
        # The recorded text contains the special tokens.
        prompt_ids = tokenizer(text=record.prompt, add_special_tokens=False)["input_ids"]
        outputs.append(
            GenerationOutput(
                request_id=record.request_id,
                prompt_ids=prompt_ids,
                generated_tokens=record.token_ids,
                logprobs=record.logprobs,
                temperature=temperature,
            )
        )
    return outputs


def _outputs_of_file(path: Path, tokenizer: Any, temperature: float) -> list[GenerationOutput]:
    """Return the sequences of a file of JSON lines."""
    numbers = count(1)

    def parse(row: Mapping[str, Any]) -> list[GenerationOutput]:
        return _outputs_of_line(row, f"line {next(numbers)}", tokenizer, temperature)

    outputs: list[GenerationOutput] = []
    for outputs_of_line in read_records(path, parse, "rollout", is_complete=True):
        outputs.extend(outputs_of_line)
    return outputs


def _outputs_of_line(
    row: Mapping[str, Any], line: str, tokenizer: Any, temperature: float
) -> list[GenerationOutput]:
    """Return the sequences of a line: one, or one for each choice of an OpenAI answer."""
    outputs: list[GenerationOutput] = []
    for index, choice in enumerate(row.get("choices", [row])):
        fields = {**row, **choice}
        tokens = _first_value(fields, TOKENS)
        logprobs = _numbers(_first_value(fields, LOGPROBS))
        if not tokens or not logprobs:
            continue
        prompt_ids: Any = _first_value(fields, PROMPT_IDS)
        if prompt_ids is None:
            (prompt_ids,) = encoded([_first_value(fields, PROMPT)], tokenizer)
        name = fields.get("request_id", fields.get("id", line))
        outputs.append(
            GenerationOutput(
                request_id=f"{name}-{fields.get('sample', index)}",
                prompt_ids=list(prompt_ids),
                generated_tokens=tokens,
                logprobs=logprobs,
                temperature=fields.get("temperature", temperature),
            )
        )
    return outputs


def _first_value(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the value of the first name that has a value; None if no name has."""
    for name in names:
        if fields.get(name) is not None:
            return fields[name]
    return None


def _numbers(logprobs: Any) -> list[float]:
    """Return log-probabilities from a list, or from OpenAI's forms for completions and chats."""
    if isinstance(logprobs, Mapping):
        logprobs = logprobs.get("token_logprobs") or logprobs.get("content")
    numbers: list[float] = []
    for token in logprobs or ():
        if isinstance(token, Mapping):
            # The form of chats.
            numbers.append(float(token["logprob"]))
        elif isinstance(token, list):
            # The form of SGLang: log-probability, token id, text.
            numbers.append(float(token[0]))
        else:
            numbers.append(float(token))
    return numbers
