"""Generate completions of a data set: check, load, generate, score and write.

Own the order of these steps: everything is checked before the model loads, and every result is
written as its sequence completes. One thread calls it.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
from cb_rollout.tools.dataset.options import DatasetOptions
from cb_rollout.tools.dataset.results import ResultFile
from cb_rollout.tools.dataset.rows import Row, RowEncoder, create_source, rows, survey
from cb_rollout.tools.dataset.scores import (
    Scorer,
    ScoreSummary,
    load_scorer,
    name_of,
    scores_of,
    summaries,
    table,
)
from cb_rollout.tools.dataset.stream import CompletionStream
from cb_rollout.types import GenerationOutput

# Interval of the progress bar, and of its lines in a log file.
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """Contents of the file of results, and this run's part in it. Prints as a few lines."""

    output: str
    num_rows: int
    num_return_sequences: int
    num_sequences: int
    num_failed: int
    """Sequences whose result is an error."""
    first_error: str | None
    """Message of the first of them; None: none failed."""
    num_resumed: int
    """Sequences in the file before this run."""
    num_tokens: int
    """Tokens sampled in this run, those of interrupted sequences included."""
    seconds: float
    """Time from this run's first request to its last result."""
    scores: list[ScoreSummary]
    """Empty when nothing was evaluated."""

    def __str__(self) -> str:
        counts = f"{self.num_sequences:,} sequences of {self.num_rows:,} rows in {self.output}"
        if self.num_resumed:
            counts += f", {self.num_resumed:,} of them from before"
        if self.num_failed:
            counts += f", {self.num_failed:,} of them failed (rows with an error)"
        lines = [counts]
        if self.first_error is not None:
            lines.append(f"the first error: {self.first_error}")
            lines.append("what failed stays so, until its lines are removed from the output")
        if self.num_tokens:
            speed = f"{self.num_tokens / self.seconds:,.0f} tokens/s"
            lines.append(f"{self.num_tokens:,} tokens in {self.seconds:.1f} s, {speed}")
        if self.scores:
            lines += ["", table(self.scores, self.num_return_sequences)]
        return "\n".join(lines)


def generate_dataset(
    model: str | os.PathLike[str] | torch.nn.Module,
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    evaluate: str | Scorer | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
    **options: Any,
) -> DatasetReport:
    """Generate completions of every row, and write each as it completes.

    An existing output is resumed: sequences that it holds are not generated again, so the same call
    finishes an interrupted run.

    Args:
        model: a checkpoint's directory or hub name, or a model.
        dataset: a JSONL or Parquet file, or a data set that the `datasets` library loads. A row has
            `prompt` (text, messages, or token ids) or `messages`, optionally `images`, an `id`, and
            any other keys. A picture is a path, relative to the file, or a data URL.
        output: JSONL, one line a sequence: its row, `sample` (its number among the row's, from 0),
            `completion`, `token_ids` and `finish_reason`; `logprobs` and `scores` if asked for;
            `error` instead if it failed.
        tokenizer: a transformers tokenizer, or for pictures a processor; None: the checkpoint's.
        evaluate: function that scores a result, given its line as a dict, or its
            `module:function`.
        overwrite: discard the results in `output`.
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
    if not isinstance(dataset, str | os.PathLike):
        raise ConfigurationError(
            f"dataset is a {type(dataset).__name__}; pass a file's path or a data set's name: "
            "Dataset.to_json(path) writes JSONL."
        )
    source = create_source(os.fspath(dataset), split=chosen.split, subset=chosen.subset)
    _check_output(dataset, output)
    folder = Path(dataset).parent if Path(dataset).is_file() else Path()
    found = survey(source)
    scorer = load_scorer(evaluate) if isinstance(evaluate, str) else evaluate
    if tokenizer is None:
        if isinstance(model, torch.nn.Module):
            raise ConfigurationError("tokenizer is None beside a model; give the model's own.")
        tokenizer = load_tokenizer(os.fspath(model))
    encoder = RowEncoder(
        tokenizer, system_prompt=chosen.system_prompt, chat=chosen.chat, folder=folder
    )
    if not isinstance(model, torch.nn.Module):
        model = load_model(os.fspath(model), chosen.dtype, chosen.device)
    settings = {
        "input": found.digest,
        "model": _digest_of_weights(hf_compat.unwrap(model)),
        "chat_template": getattr(tokenizer, "chat_template", None),
        **chosen.shaping_results(),
        "evaluate": scorer and name_of(scorer),
    }
    with ResultFile(output, settings, overwrite=overwrite) as results:
        num_resumed, started = results.num_done, time.perf_counter()
        num_tokens = 0
        num_wanted = found.num_rows * chosen.num_return_sequences
        if num_resumed < num_wanted:
            run = _Run(model, tokenizer, encoder, chosen, results, scorer)
            wanted = _missing(rows(source), results, chosen.num_return_sequences)
            num_tokens = run.run(wanted, num_wanted, progress_bar)
        return DatasetReport(
            output=os.fspath(output),
            num_rows=found.num_rows,
            num_return_sequences=chosen.num_return_sequences,
            num_sequences=results.num_done,
            num_failed=results.num_failed,
            first_error=results.first_error,
            num_resumed=num_resumed,
            num_tokens=num_tokens,
            seconds=time.perf_counter() - started,
            scores=summaries(results) if scorer else [],
        )


class _Run:
    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        encoder: RowEncoder,
        options: DatasetOptions,
        results: ResultFile,
        scorer: Scorer | None,
    ) -> None:
        is_plain = options.generation_config == "none"
        self._manager = ContinuousBatchingManager(
            model,
            GenerationConfig(do_sample=True) if is_plain else None,
            options.rollout_config(),
            tokenizer=tokenizer,
        )
        params = options.sampling_params(self._manager.defaults)
        if params.is_greedy and options.num_return_sequences > 1:
            raise ConfigurationError(
                f"num_return_sequences={options.num_return_sequences} of greedy decoding would be "
                "equal; set a temperature above 0, or generation_config='none'."
            )
        self._stream = CompletionStream(self._manager, params, encoder.encoded)
        self._tokenizer, self._results, self._scorer = tokenizer, results, scorer

    def run(
        self, wanted: Iterator[tuple[Row, list[int]]], num_wanted: int, progress_bar: bool
    ) -> int:
        """Generate and write the wanted sequences; return the number of sampled tokens."""
        counters = self._manager.counters
        bar = tqdm(
            total=num_wanted,
            initial=self._results.num_done,
            disable=not progress_bar,
            unit="seq",
            mininterval=PROGRESS_SECONDS,
            smoothing=0.05,
        )
        started = time.perf_counter()
        self._manager.start()
        try:
            with bar:
                for completed in self._stream.completed(wanted):
                    if completed:
                        self._results.append([self._result(*sequence) for sequence in completed])
                    speed = counters.tokens_generated / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=not completed)
                    bar.update(len(completed))
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"interrupted: {self._results.num_done:,} of {num_wanted:,} sequences are in "
                f"{self._results.path}; run the same again to resume."
            ) from interrupt
        finally:
            self._manager.stop(timeout=0)
        return counters.tokens_generated

    def _result(
        self, row: Row, sample: int, output: GenerationOutput | None, error: str | None
    ) -> dict[str, Any]:
        result: dict[str, Any] = {"id": row.id, "sample": sample, **row.values}
        if output is not None:
            tokens = output.generated_tokens
            result["completion"] = self._tokenizer.decode(tokens, skip_special_tokens=True)
            result["token_ids"] = tokens
            result["finish_reason"] = output.finish_reason
            if output.logprobs:
                result["logprobs"] = output.logprobs
        if error is not None:
            result["error"] = f"{row.label}: {error}"
        elif self._scorer is not None:
            result["scores"] = scores_of(self._scorer, result, row.label)
        return result


def _check_output(dataset: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    if os.path.exists(dataset) and os.path.exists(output) and os.path.samefile(dataset, output):
        raise ConfigurationError(f"{output} is the input; name another output.")
    if not os.path.isdir(folder := os.path.dirname(output) or os.curdir):
        why = f"{folder} is not a directory; make it, or name another output"
        raise ConfigurationError(f"{output} cannot be written: {why}.")


def _missing(
    all_rows: Iterator[Row], results: ResultFile, num_return_sequences: int
) -> Iterator[tuple[Row, list[int]]]:
    """Yield the rows that lack sequences, with the numbers of these."""
    for row in all_rows:
        samples = [s for s in range(num_return_sequences) if not results.has(row.id, s)]
        if samples:
            yield row, samples


def _digest_of_weights(model: PreTrainedModel) -> str:
    """Hash each parameter's name, shape, dtype and bytes."""

    def described(named: tuple[str, torch.Tensor]) -> list[Any]:
        name, parameter = named
        data = parameter.detach().flatten().cpu().view(torch.uint8).numpy().data
        digest = hashlib.sha256(data).hexdigest()
        return [name, list(parameter.shape), str(parameter.dtype), digest]

    # Hashing runs outside Python's lock.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        parameters = list(threads.map(described, model.named_parameters()))
    return hashlib.sha256(json.dumps(parameters).encode()).hexdigest()
