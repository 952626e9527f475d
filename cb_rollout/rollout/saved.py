"""Keep the rollouts of a training as Parquet files, and train from them again without an engine.

A file holds what one process sampled in one rollout: a row for each sequence, call after call of
`generate_batch`. Called by the trainer, on its thread.
"""

import io
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.engine.model.routers import Routers
from cb_rollout.errors import ConfigurationError
from cb_rollout.metrics.jsonl import write_whole
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus, SyncReport

# Of one process, in the order of the rollouts: the step that trains on it, its number, the rank.
FILE_NAME = "{step:08}-{number:06}-{rank:05}.parquet"
_NAME = re.compile(r"(\d{8})-\d{6}-(\d{5})\.parquet")

# Fields of a `GenerationOutput` that a row holds as they are.
_PLAIN = (
    "request_id", "status", "finish_reason", "prompt_ids", "generated_tokens", "logprobs",
    "kept_token_ids", "error", "temperature", "policy_versions",
)  # fmt: skip


def _schema() -> Any:
    import pyarrow as pa

    integers = pa.list_(pa.int32())
    texts = {name: pa.string() for name in ("mode", "request_id", "status", "finish_reason")}
    tokens = {"prompt_ids": integers, "generated_tokens": integers}
    numbers = {"logprobs": pa.list_(pa.float64()), "reward": pa.float64()}
    replayed = {"kept_token_ids": pa.list_(integers), "routed_experts": pa.binary()}
    return pa.schema(
        {"call": pa.int32(), "step": pa.int64(), "error": pa.string()}
        | texts | tokens | numbers | replayed
        | {"temperature": pa.float64(), "policy_versions": pa.list_(pa.list_(pa.int64()))}
    )  # fmt: skip


class RolloutSaver:
    """Write the rollouts of one process into a folder that all processes share."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank, self._count = Path(folder), rank, 0

    def begin_training(self, step: int) -> None:
        """Go on after a checkpoint's step: what was sampled after it is deleted, and comes again.

        `ConfigurationError`: a training from its first step would write among another's files.
        """
        later = [path for path in _files(self._folder, self._rank) if _step_of(path) > step]
        if later and not step:
            raise ConfigurationError(
                f"save_rollouts={str(self._folder)!r} holds the rollouts of another training; name "
                "an empty folder, or resume that training from its checkpoint."
            )
        for path in later:
            path.unlink()

    def save(
        self,
        step: int,
        mode: str,
        calls: Sequence[Sequence[GenerationOutput]],
        rewards: Mapping[str, float],
    ) -> None:
        """Write a file of the outputs of each call, with rewards by request id."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        rows = [
            _row(output, call=call, step=step, mode=mode, reward=rewards.get(output.request_id))
            for call, outputs in enumerate(calls)
            for output in outputs
        ]
        name = FILE_NAME.format(step=step, number=self._count, rank=self._rank)
        self._count += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows, _schema()), content, compression="zstd")
        write_whole(self._folder / name, content.getvalue())


class SavedRollouts:
    """The rollouts that a training saved, in place of an engine.

        attach(trainer, SavedRollouts("rollouts", config))

    The trainer gets the sequences, in the order in which it got them first. A trainer of the same
    weights, data, seed and settings then has the same losses, in every bit.
    """

    is_joint = False

    def __init__(self, folder: str, config: Any = None) -> None:
        """Look for the files of a `save_rollouts`; the loss follows that training's `config`.

        Raises:
            ConfigurationError: the folder holds no rollouts.
        """
        self.config, self.tokenizer = as_rollout_config(config), None
        self.policy_version = 0
        """The newest version that sampled a token of the last rollout."""
        self._folder, self._rank = Path(folder), 0
        self._calls: Iterator[list[GenerationOutput]] = iter(())
        self.manager: Any = None
        if not _files(self._folder):
            raise ConfigurationError(
                f"{folder!r} holds no saved rollouts; pass the save_rollouts of the RolloutConfig "
                "that a trainer was attached with."
            )

    def open(self, rank: int, generation_config: Any, routers: Routers | None) -> None:
        """Serve one process of a trainer, from the first rollout on."""
        self.manager = SimpleNamespace(
            group=None,
            routers=routers,
            defaults=from_generation_config(generation_config),
            input_processor=SimpleNamespace(num_sequences=0),
        )
        self._rank = rank
        self._calls = _calls(_files(self._folder, rank))

    def begin_training(self, step: int) -> None:
        """Go on after a checkpoint's step; 0: after what was asked for before the training."""
        if step:
            files = _files(self._folder, self._rank)
            self._calls = _calls(path for path in files if _step_of(path) > step)

    def generate_batch(self, inputs: Iterable[Any], *_: Any, **__: Any) -> dict[str, Any]:
        """Return the outputs of the next call; `ConfigurationError`: none, or of other prompts."""
        outputs = next(self._calls, None)
        if outputs is None:
            raise ConfigurationError(
                f"{self._folder} holds no more rollouts; lower max_steps to those that were saved."
            )
        asked = [item["prompt"] if isinstance(item, Mapping) else item for item in inputs]
        if [output.prompt_ids for output in outputs] != asked:
            raise ConfigurationError(
                f"the trainer asks for other prompts than {self._folder} holds next; train with "
                "the data, seed, batch sizes, evaluations and processes of the training that "
                "sampled them."
            )
        versions = [version for output in outputs for version, _ in output.policy_versions]
        self.policy_version = max(versions, default=self.policy_version)
        return {output.request_id: output for output in outputs}

    def metrics(self) -> dict[str, float]:
        """Return nothing: nothing was sampled."""
        return {}

    def sync_weights(self, *_: Any) -> SyncReport:
        return SyncReport(self.policy_version, 0.0, 0)

    def follow(self, *_: Any, **__: Any) -> None:
        """Do nothing, as the next ones: there is no engine."""

    sleep = wake = lend_to_trainer = join = close = follow


def _files(folder: Path, rank: int | None = None) -> list[Path]:
    named = [(path, _NAME.fullmatch(path.name)) for path in folder.glob("*.parquet")]
    return sorted(p for p, name in named if name and rank in (None, int(name[2])))


def _step_of(path: Path) -> int:
    return int(path.name[:8])


def _calls(paths: Iterable[Path]) -> Iterator[list[GenerationOutput]]:
    import pyarrow.parquet as parquet

    for path in paths:
        rows = parquet.read_table(path).to_pylist()
        for _, of_call in groupby(rows, itemgetter("call")):
            yield [_output(row) for row in of_call]


def _row(output: GenerationOutput, **more: Any) -> dict[str, Any]:
    row = {name: getattr(output, name) for name in _PLAIN} | more
    if output.routed_experts is not None:
        content = io.BytesIO()
        np.save(content, output.routed_experts)
        row["routed_experts"] = content.getvalue()
    return row


def _output(row: Mapping[str, Any]) -> GenerationOutput:
    output = GenerationOutput(**{name: row[name] for name in _PLAIN})
    output.status = RequestStatus(row["status"])
    if (reason := row["finish_reason"]) is not None:
        output.finish_reason = FinishReason(reason)
    output.policy_versions = [(version, count) for version, count in row["policy_versions"]]
    if (kept := row["kept_token_ids"]) is not None:
        output.kept_token_ids = [array("i", ids) for ids in kept]
    if (routes := row["routed_experts"]) is not None:
        output.routed_experts = np.load(io.BytesIO(routes))
    return output
