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
from typing import Any, NoReturn

import numpy as np

from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.engine.model.routers import Routers
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.metrics.jsonl import write_whole
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus, SyncReport

# Of one process, in the order of the rollouts: the step that trains on it, its number, the rank.
FILE_NAME = "{step:08}-{number:06}-{rank:05}.parquet"
_NAME = re.compile(r"([0-9]{8})-([0-9]{6})-([0-9]{5})\.parquet")

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
    """Write the rollouts of one process into a folder that all processes share.

    A file is never written over, and only a resumed training writes beside files of an earlier run.
    """

    def __init__(self, folder: str, rank: int, num_processes: int) -> None:
        """Look for files of an earlier run, before this one writes any.

        Args:
            folder: folder of the files, made if it is missing.
            rank: number of this process; the first one also looks after files of ranks that this
                run does not have.
            num_processes: processes of this run.
        """
        self._folder = Path(folder)
        self._rank = rank
        self._num_processes = num_processes
        self._count = 0
        self._earlier = self._own_files()

    def _own_files(self) -> list[Path]:
        return [path for path in _files(self._folder) if self._looks_after(_rank_of(path))]

    def _looks_after(self, rank: int) -> bool:
        is_of_no_process = rank >= self._num_processes
        return rank == self._rank or (self._rank == 0 and is_of_no_process)

    def require_own_folder(self) -> None:
        """Raise `ConfigurationError` if an earlier run saved here, and this one does not go on."""
        if self._earlier:
            self._refuse(self._earlier[0])

    def begin_training(self, step: int) -> None:
        """Go on after a checkpoint's step: what was sampled after it is deleted, and comes again.

        Raises:
            ConfigurationError: a training from its first step would write among another's files.
        """
        later = [path for path in self._own_files() if _step_of(path) > step]
        if not step:
            self.require_own_folder()
            if later:
                self._refuse(later[0])
        for path in later:
            path.unlink()
        self._earlier = []
        # A step that was saved before may be evaluated again.
        numbers = [_number_of(path) + 1 for path in self._own_files()]
        self._count = max([self._count, *numbers])

    def _refuse(self, path: Path) -> NoReturn:
        raise ConfigurationError(
            f"save_rollouts={str(self._folder)!r} holds rollouts of another run, such as "
            f"{path.name}; name an empty folder, or resume that training from its checkpoint "
            "before anything is sampled."
        )

    def save(
        self,
        step: int,
        mode: str,
        calls: Sequence[Sequence[GenerationOutput]],
        rewards: Mapping[str, float],
    ) -> None:
        """Write a file of the outputs of each call.

        Args:
            step: the trainer's step after it trained on them; in evaluation, at the time.
            mode: "train" or "eval".
            calls: outputs of each call of the engine.
            rewards: reward of a sequence by its request id; none where it was not scored.

        Raises:
            ConfigurationError: another run, which began after this one, wrote the file.
        """
        import pyarrow as pa
        import pyarrow.parquet as parquet

        rows = [
            _row(output, call=call, step=step, mode=mode, reward=rewards.get(output.request_id))
            for call, outputs in enumerate(calls)
            for output in outputs
        ]
        path = self._folder / FILE_NAME.format(step=step, number=self._count, rank=self._rank)
        if path.exists():
            raise ConfigurationError(
                f"{path} is there already: another run saves its rollouts there too; name a "
                "save_rollouts for each."
            )
        self._count += 1
        self._folder.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows, _schema()), content, compression="zstd")
        write_whole(path, content.getvalue())


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
            ConfigurationError: the folder holds no rollouts, or `config` saves into it.
        """
        self.config, self.tokenizer = as_rollout_config(config), None
        saved_into = self.config.save_rollouts
        if saved_into is not None and Path(saved_into).resolve() == Path(folder).resolve():
            raise ConfigurationError(
                f"save_rollouts={saved_into!r} is the folder that is trained from; name another "
                "folder, or leave it out."
            )
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
        """Return the outputs of the next call.

        Raises:
            ConfigurationError: there is none, it is of other prompts, or its file cannot be read.
        """
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
    """Return the files in the order of the rollouts; None: of every process."""
    named = [path for path in folder.glob("*.parquet") if _NAME.fullmatch(path.name)]
    return sorted(path for path in named if rank is None or _rank_of(path) == rank)


def _step_of(path: Path) -> int:
    return _numbers_of(path)[0]


def _number_of(path: Path) -> int:
    return _numbers_of(path)[1]


def _rank_of(path: Path) -> int:
    return _numbers_of(path)[2]


def _numbers_of(path: Path) -> list[int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return [int(digits) for digits in match.groups()]


def _calls(paths: Iterable[Path]) -> Iterator[list[GenerationOutput]]:
    for path in paths:
        yield from _calls_in(path)


def _calls_in(path: Path) -> list[list[GenerationOutput]]:
    """Return the outputs of each call of a file; `ConfigurationError`: it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = file.read().to_pylist()
        by_call = groupby(rows, itemgetter("call"))
        return [[_output(row) for row in rows_of_call] for _, rows_of_call in by_call]
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no whole file of saved rollouts ({error_text(error)}); restore it from a "
            "copy, or resume the training that saved it from a checkpoint before step "
            f"{_step_of(path)}, which samples it again."
        ) from error


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
