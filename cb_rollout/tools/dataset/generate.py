"""`generate_dataset`: a data set in, a line for each completion out.

Owns the order of things: what is checked before what is loaded, and what is written when. Called
from one thread.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.checkpoint import load_model, load_tokenizer
from cb_rollout.tools.dataset.options import DatasetOptions
from cb_rollout.tools.dataset.prompts import PromptEncoder
from cb_rollout.tools.dataset.report import DatasetReport
from cb_rollout.tools.dataset.results import ResultFile
from cb_rollout.tools.dataset.rows import Row, rows, survey
from cb_rollout.tools.dataset.scores import Scorer, load_scorer, name_of, scores_of, summaries
from cb_rollout.tools.dataset.source import create_source
from cb_rollout.tools.dataset.stream import Flight, Landed

WEIGHTS_SAMPLED = 64
# Values of each parameter that tell one checkpoint from another.

PROGRESS_SECONDS = 1.0
# How often the bar is drawn; a log file gets as many lines.


def generate_dataset(
    model: str | os.PathLike[str] | torch.nn.Module,
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    evaluate: str | Scorer | None = None,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress_bar: bool = True,
    **options: Any,
) -> DatasetReport:
    """Generate completions of every row, and write each as it ends.

    An output that exists is resumed: what it holds is not generated again, so the same call
    finishes what an interrupted one began.

    Args:
        model: a checkpoint's directory or hub name; or a model.
        dataset: a JSONL or Parquet file, or what the `datasets` library loads. A row has `prompt`
            (text, messages, or token ids) or `messages`, perhaps an `id`, and any other keys.
        output: JSONL, a line for each sequence: its row, `sample` (its number among the row's, from
            0), `completion`, `token_ids` and `finish_reason`; `logprobs` and `scores` where asked
            for; `error` instead where it failed.
        tokenizer: None: the checkpoint's.
        evaluate: scores each result: a function of its line as a dict, or its `module:function`.
        overwrite: start over, whatever `output` holds.
        retry_failed: generate again what `output` holds as an error.
        progress_bar: show sequences done, tokens per second and time left on stderr.
        **options: the fields of `DatasetOptions`.

    Returns:
        What the output then holds.

    Raises:
        ConfigurationError: an option, the model, the data set or the output cannot be used, or
            `evaluate` raised.
        InvalidRequestError: rows cannot be used; nothing was generated.
        KeyboardInterrupt: says what is done.
    """
    chosen = DatasetOptions(**options)
    if not isinstance(dataset, str | os.PathLike):
        raise ConfigurationError(
            f"dataset is a {type(dataset).__name__}; pass a file's path or a data set's name: "
            "Dataset.to_json(path) writes JSONL."
        )
    source = create_source(os.fspath(dataset), split=chosen.split, subset=chosen.subset)
    _refuse_same_file(dataset, output)
    found = survey(source)
    scorer = load_scorer(evaluate) if isinstance(evaluate, str) else evaluate
    if tokenizer is None:
        if isinstance(model, torch.nn.Module):
            raise ConfigurationError("tokenizer is None beside a model; give the model's own.")
        tokenizer = load_tokenizer(os.fspath(model))
    encoder = PromptEncoder(tokenizer, system_prompt=chosen.system_prompt, chat=chosen.chat)
    encoder.refuse_what_cannot_be_encoded(found)
    if not isinstance(model, torch.nn.Module):
        model = load_model(os.fspath(model), chosen.dtype, chosen.device)
    settings = {
        "input": found.digest,
        "model": _digest_of_weights(hf_compat.unwrap(model)),
        "chat_template": getattr(tokenizer, "chat_template", None),
        **chosen.shaping_results(),
        "evaluate": scorer and name_of(scorer),
    }
    with ResultFile(output, settings, overwrite=overwrite, retry_failed=retry_failed) as results:
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
    """One engine's life over what is missing."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        encoder: PromptEncoder,
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
                "equal; set a temperature above 0, or generation_config=none."
            )
        self._flight = Flight(self._manager, params, encoder.token_ids)
        self._tokenizer, self._results, self._scorer = tokenizer, results, scorer

    def run(
        self, wanted: Iterator[tuple[Row, list[int]]], num_wanted: int, progress_bar: bool
    ) -> int:
        """Generate and write what is wanted; returns how many tokens were sampled."""
        counters = self._manager.engine.counters
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
                for landed in self._flight.landings(wanted):
                    if landed:
                        self._results.append([self._result(one) for one in landed])
                    speed = counters.tokens_generated / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=not landed)
                    bar.update(len(landed))
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(
                f"interrupted: {self._results.num_done:,} of {num_wanted:,} sequences are in "
                f"{self._results.path}; run the same again to resume."
            ) from interrupt
        finally:
            self._manager.stop(timeout=0)
        return counters.tokens_generated

    def _result(self, landed: Landed) -> dict[str, Any]:
        row, sample, output, error = landed
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


def _refuse_same_file(dataset: str | os.PathLike[str], output: str | os.PathLike[str]) -> None:
    if os.path.exists(dataset) and os.path.exists(output) and os.path.samefile(dataset, output):
        raise ConfigurationError(f"{output} is the input; name another output.")


def _missing(
    all_rows: Iterator[Row], results: ResultFile, num_return_sequences: int
) -> Iterator[tuple[Row, list[int]]]:
    """Each row that lacks sequences, and their numbers."""
    for row in all_rows:
        samples = [s for s in range(num_return_sequences) if not results.has(row.id, s)]
        if samples:
            yield row, samples


def _digest_of_weights(model: PreTrainedModel) -> str:
    """Tells one checkpoint from another: each parameter's shape, dtype, and a few values."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        stride = max(1, values.numel() // WEIGHTS_SAMPLED)
        sampled = values[::stride].float().cpu().tolist()
        digest.update(
            json.dumps([name, list(parameter.shape), str(parameter.dtype), sampled]).encode()
        )
    return digest.hexdigest()
