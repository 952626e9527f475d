"""Generate completions of a data set: check, load, generate, score and write.

Owns the order of these steps: everything is checked before the model loads, and every result is
written as its sequence completes. Only enough sequences are submitted to keep the batch full. One
thread encodes and submits, while the manager's thread generates.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.images.processor import ImagePrompt
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
from cb_rollout.rollout.prompts import Encoded
from cb_rollout.tools.dataset import identity
from cb_rollout.tools.dataset import scores as scoring
from cb_rollout.tools.dataset.options import DatasetOptions
from cb_rollout.tools.dataset.results import ResultFile
from cb_rollout.tools.dataset.rows import (
    Row,
    Source,
    Survey,
    create_source,
    encoded_prompt,
    rows,
    survey,
)
from cb_rollout.types import GenerationOutput

# A full batch runs and another waits, so that a completed sequence is replaced at once.
BATCHES_IN_FLIGHT = 2

# Longest completion, in tokens, if no length is asked for.
DEFAULT_NEW_TOKENS = 512

# Longest wait for a completed sequence.
POLL_SECONDS = 0.25

# Interval of the progress bar, and of its lines in a log file.
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """Totals of the result file, and of this run. Prints as a few lines."""

    output: str
    num_rows: int
    num_return_sequences: int
    num_sequences: int
    num_failed: int
    """Number of sequences whose result is an error."""
    first_error: str | None
    """Message of the first error; None: no sequence failed."""
    num_resumed: int
    """Sequences in the file before this run."""
    num_tokens: int
    """Tokens sampled in this run, including those of interrupted sequences."""
    seconds: float
    """Time from this run's first request to its last result."""
    scores: list[scoring.ScoreSummary]
    """Empty if nothing was scored."""

    def __str__(self) -> str:
        lines = [f"{self.num_sequences:,} sequences of {self.num_rows:,} rows in {self.output}"]
        if self.num_resumed:
            lines[0] += f", {self.num_resumed:,} of them from before"
        if self.num_failed:
            lines[0] += f", {self.num_failed:,} of them failed (rows with an error)"
            lines.append(f"the first error: {self.first_error}")
            lines.append("what failed stays so, until its lines are removed from the output")
        if self.num_tokens:
            speed = f"{self.num_tokens / self.seconds:,.0f} tokens/s"
            lines.append(f"{self.num_tokens:,} tokens in {self.seconds:.1f} s, {speed}")
        if self.scores:
            lines += ["", scoring.table(self.scores, self.num_return_sequences)]
        return "\n".join(lines)


def generate_dataset(
    model: str | os.PathLike[str] | torch.nn.Module,
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    evaluate: str | scoring.Scorer | None = None,
    overwrite: bool = False,
    rescore: bool = False,
    progress_bar: bool = True,
    **options: Any,
) -> DatasetReport:
    """Generate completions of every row, and write each as it completes.

    If `output` exists, the run resumes: sequences in it are not generated again, so the same call
    finishes an interrupted run.

    Args:
        model: a checkpoint's directory or hub name, or a model.
        dataset: a JSONL or Parquet file, or a data set that the `datasets` library loads. A row has
            `prompt` (text, messages, or token ids) or `messages`, optionally `images`, an `id`, and
            any other keys. A picture is a path, relative to the file, or a data URL.
        output: JSONL, one line per sequence: its row, `sample` (its index within the row, from 0),
            `completion`, `token_ids` and `finish_reason`; `logprobs` and `scores` if asked for;
            `error` instead if it failed.
        tokenizer: a transformers tokenizer, or for pictures a processor; None: the checkpoint's.
        evaluate: function that scores a result, given its line as a dict, or its
            `module:function`.
        overwrite: discard the results in `output`.
        rescore: score the sequences in `output` again, with the current `evaluate`.
        progress_bar: show sequences done, tokens per second and time left on stderr.
        **options: the fields of `DatasetOptions`.

    Returns:
        Counts, speed and scores.

    Raises:
        ConfigurationError: an option, the model, the data set or the output cannot be used, or
            `evaluate` raised.
        InvalidRequestError: a row cannot be used; nothing was generated.
        KeyboardInterrupt: interrupted; its message says how many sequences are done.
    """
    chosen = DatasetOptions(**options)
    _check_paths(dataset, output)
    if rescore and evaluate is None:
        raise ConfigurationError("rescore=True needs a scoring function; pass one as evaluate.")
    source = create_source(os.fspath(dataset), split=chosen.split, subset=chosen.subset)
    folder = Path(dataset).parent if Path(dataset).is_file() else Path()
    surveyed = survey(source, folder)
    num_rows = surveyed.num_rows
    scorer = scoring.load_scorer(evaluate) if isinstance(evaluate, str) else evaluate
    if tokenizer is None:
        if isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                "a model was passed without a tokenizer; pass the model's own tokenizer."
            )
        tokenizer = load_tokenizer(os.fspath(model))
    if not isinstance(model, torch.nn.Module):
        model = load_model(os.fspath(model), chosen.dtype, chosen.device)
    settings = _settings(hf_compat.unwrap(model), tokenizer, scorer, chosen, surveyed)
    scored = partial(_rescored, scorer) if rescore and scorer else None
    with ResultFile(output, settings, overwrite=overwrite, scored=scored) as results:
        num_resumed = results.num_done
        num_tokens = 0
        seconds = 0.0
        num_wanted = num_rows * chosen.num_return_sequences
        if num_resumed < num_wanted:
            manager, params = _create_manager(model, tokenizer, chosen)
            encode = partial(encoded_prompt, tokenizer, chosen, folder)
            missing = _missing(source, chosen.num_return_sequences, results)
            num_tokens, seconds = _write(
                results=results,
                completed=completions(manager, params, encode, missing),
                result_of=partial(_result, tokenizer, scorer),
                manager=manager,
                num_wanted=num_wanted,
                progress_bar=progress_bar,
            )
        return DatasetReport(
            output=os.fspath(output),
            num_rows=num_rows,
            num_return_sequences=chosen.num_return_sequences,
            num_sequences=results.num_done,
            num_failed=results.num_failed,
            first_error=results.first_error,
            num_resumed=num_resumed,
            num_tokens=num_tokens,
            seconds=seconds,
            scores=scoring.summaries(results) if scorer else [],
        )


def _settings(
    model: PreTrainedModel,
    tokenizer: Any,
    scorer: scoring.Scorer | None,
    options: DatasetOptions,
    surveyed: Survey,
) -> dict[str, Any]:
    """Return the settings that determine the results, by name, as JSON values.

    Args:
        model: the model, unwrapped.
        tokenizer: a tokenizer or a processor.
        scorer: the scoring function; None: nothing is scored.
        options: the options of the run.
        surveyed: digests of the rows and of their pictures.
    """
    return {
        "input": surveyed.digest,
        "pictures": surveyed.pictures,
        "model": identity.digest_of_weights(model),
        **identity.model_settings(model),
        "tokenizer": identity.tokenizer_settings(tokenizer),
        "chat_template": getattr(tokenizer, "chat_template", None),
        **options.shaping_results(),
        "sampling_params": identity.sampling_settings(model, options),
        "evaluate": None if scorer is None else scoring.name_of(scorer),
        "evaluate_code": None if scorer is None else identity.digest_of_scorer(scorer),
    }


def _missing(
    source: Source, num_return_sequences: int, results: ResultFile
) -> Iterator[tuple[Row, list[int]]]:
    """Yield each row with the indices of its sequences that have no result."""
    for row in rows(source):
        samples = range(num_return_sequences)
        missing = [sample for sample in samples if not results.has(row.id, sample)]
        if missing:
            yield row, missing


class CompletedSequence(NamedTuple):
    """A completed or failed sequence of a row."""

    row: Row
    sample: int
    """Index within the row, from 0."""
    output: GenerationOutput | None
    """None: the request was refused."""
    error: str | None


def completions(
    manager: ContinuousBatchingManager,
    params: SamplingParams,
    encoded: Callable[[Row], Encoded],
    wanted: Iterator[tuple[Row, list[int]]],
) -> Iterator[list[CompletedSequence]]:
    """Generate sequences of rows; yield the completed ones, at least every `POLL_SECONDS`.

    `wanted` yields rows with the indices of the sequences to generate; it is read as room becomes
    available. Without `max_new_tokens`, at most `DEFAULT_NEW_TOKENS` are sampled, within the
    model's limit. With a seed, tokens depend only on the seed, the row's id and the sequence's
    index. `encoded` encodes a row, and may raise `InvalidRequestError`.
    """
    max_in_flight = BATCHES_IN_FLIGHT * manager.memory_plan.num_slots
    in_flight: dict[str, tuple[Row, int]] = {}
    output_queue = OutputQueue()

    def has_room_for(num_samples: int) -> bool:
        # A row with more sequences than there is room for runs alone.
        return not in_flight or len(in_flight) + num_samples <= max_in_flight

    upcoming = next(wanted, None)
    while upcoming or in_flight:
        completed: list[CompletedSequence] = []
        while upcoming and has_room_for(len(upcoming[1])):
            row, samples = upcoming
            try:
                prompt = encoded(row)
                params_of_row = _params_of(row, prompt, params)
                requests = manager.create_requests([prompt], [params_of_row], members=samples)
                manager.submit(requests, output_queue)
                for request, sample in zip(requests, samples, strict=True):
                    in_flight[request.request_id] = (row, sample)
            except InvalidRequestError as error:
                for sample in samples:
                    completed.append(CompletedSequence(row, sample, None, str(error)))
            upcoming = next(wanted, None)
        if in_flight:
            output = output_queue.take(timeout=POLL_SECONDS)
            while output is not None:
                row, sample = in_flight.pop(output.request_id)
                completed.append(CompletedSequence(row, sample, output, output.error))
                output = output_queue.take(timeout=0)
        yield completed


def _params_of(row: Row, prompt: Encoded, params: SamplingParams) -> SamplingParams:
    """Return the parameters of a row's sequences, with the row's seed and limit."""
    if params.seed is not None:
        digest = hashlib.blake2b(repr((params.seed, row.id)).encode(), digest_size=7).digest()
        params = replace(params, seed=int.from_bytes(digest))
    if params.max_new_tokens is None:
        token_ids = prompt.token_ids if isinstance(prompt, ImagePrompt) else prompt
        params = replace(params, max_length=len(token_ids) + DEFAULT_NEW_TOKENS)
    return params


def _create_manager(
    model: torch.nn.Module, tokenizer: Any, options: DatasetOptions
) -> tuple[ContinuousBatchingManager, SamplingParams]:
    """Create the engine of a run, and return it with the parameters of every sequence."""
    # None: the generation config that is saved with the model.
    generation_config = None
    if options.generation_config == "none":
        generation_config = GenerationConfig(do_sample=True)
    manager = ContinuousBatchingManager(
        model, generation_config, options.rollout_config(), tokenizer=tokenizer
    )
    params = options.sampling_params(manager.defaults)
    if params.is_greedy and options.num_return_sequences > 1:
        raise ConfigurationError(
            f"greedy decoding would make all num_return_sequences={options.num_return_sequences} "
            "sequences of a row equal; set a temperature above 0, or generation_config='none'."
        )
    longest = manager.limits.max_positions
    if longest is not None and (params.max_new_tokens or 0) >= longest:
        raise ConfigurationError(
            f"max_new_tokens={params.max_new_tokens} leaves no room for a prompt: the model takes "
            f"at most {longest} tokens per sequence; lower it."
        )
    return manager, params


def _write(
    results: ResultFile,
    completed: Iterator[list[CompletedSequence]],
    result_of: Callable[[CompletedSequence], dict[str, Any]],
    manager: ContinuousBatchingManager,
    num_wanted: int,
    progress_bar: bool,
) -> tuple[int, float]:
    """Write the result of each completed sequence; return the sampled tokens, and the seconds.

    Args:
        results: the file of results.
        completed: completed sequences, as `completions` yields them.
        result_of: returns the line of a sequence as a dict.
        manager: runs while the sequences are read; stopped at the end.
        num_wanted: sequences of the whole data set.
        progress_bar: show the progress on stderr.
    """
    bar = tqdm(
        total=num_wanted,
        initial=results.num_done,
        disable=not progress_bar,
        unit="seq",
        mininterval=PROGRESS_SECONDS,
        smoothing=0.05,
    )
    started = time.perf_counter()
    manager.start()
    try:
        with bar:
            for new in completed:
                if new:
                    results.append(list(map(result_of, new)))
                speed = manager.counters.tokens_generated / (time.perf_counter() - started)
                bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=not new)
                bar.update(len(new))
        seconds = time.perf_counter() - started
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(
            f"interrupted: {results.num_done:,} of {num_wanted:,} sequences are in "
            f"{results.path}; run the same again to resume."
        ) from interrupt
    finally:
        manager.stop(timeout=0)
    return manager.counters.tokens_generated, seconds


def _result(
    tokenizer: Any, scorer: scoring.Scorer | None, sequence: CompletedSequence
) -> dict[str, Any]:
    row = sequence.row
    output = sequence.output
    result: dict[str, Any] = {"id": row.id, "sample": sequence.sample, **row.values}
    if output is not None:
        tokens = output.generated_tokens
        result["completion"] = tokenizer.decode(tokens, skip_special_tokens=True)
        result["token_ids"] = tokens
        result["finish_reason"] = output.finish_reason
        if output.logprobs:
            result["logprobs"] = output.logprobs
    if sequence.error is not None:
        result["error"] = f"{row.label}: {sequence.error}"
    elif scorer is not None:
        result["scores"] = scoring.scores_of(scorer, result, row.label)
    return result


def _rescored(scorer: scoring.Scorer, result: dict[str, Any]) -> dict[str, Any]:
    """Return a stored result with new scores; the function does not see the old ones."""
    unscored = dict(result)
    unscored.pop("scores", None)
    if "error" in result:
        return unscored
    scores = scoring.scores_of(scorer, unscored, "a finished result")
    return {**unscored, "scores": scores}


def _check_paths(dataset: Any, output: str | os.PathLike[str]) -> None:
    if not isinstance(dataset, str | os.PathLike):
        raise ConfigurationError(
            f"dataset is a {type(dataset).__name__}; pass a file's path or a data set's name: "
            "Dataset.to_json(path) writes JSONL."
        )
    if os.path.exists(dataset) and os.path.exists(output) and os.path.samefile(dataset, output):
        raise ConfigurationError(f"{output} is the input; name another output.")
    folder = os.path.dirname(output) or os.curdir
    if not os.path.isdir(folder):
        why = f"{folder} is not a directory; make it, or name another output"
        raise ConfigurationError(f"{output} cannot be written: {why}.")
    if os.path.isdir(output):
        raise ConfigurationError(f"{output} cannot be written: it is a directory; name a file.")
