"""Save the rollouts of a training as Parquet files, and train from them without an engine.

A file holds the sequences that one process sampled in one rollout, one row each, in the order of
its calls of `generate_batch`. Called by the trainer, on its thread.
"""

import io
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch

from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.combinations import refused
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.model.routers import Routers
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.metrics.jsonl import write_whole
from cb_rollout.metrics.live_metrics import Durations
from cb_rollout.metrics.write_faults import write_advice
from cb_rollout.packing.logprobs import routers_of
from cb_rollout.rollout.sampler import Sampler, TrainingRun
from cb_rollout.types import FinishReason, GenerationOutput, RequestStatus, SyncReport

# The step that trains on the rollout, the file's number, and the rank. In a process, names sort in
# the order of the rollouts.
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

    Never overwrites a file. Only a resumed training may write into a folder with earlier files.
    """

    def __init__(self, folder: str, rank: int, num_processes: int) -> None:
        """Look for files of an earlier run, before this one writes any.

        Args:
            folder: folder for the files, created if missing.
            rank: number of this process; rank 0 also handles files of ranks that this run does not
                have.
            num_processes: processes of this run.
        """
        self._folder = Path(folder)
        self._rank = rank
        self._num_processes = num_processes
        self._count = 0
        self._earlier = self._kept_files()

    def _kept_files(self) -> list[Path]:
        """Return the files of this process, and on rank 0 those of missing ranks."""
        return [path for path in _files(self._folder) if self._looks_after(_parts_of(path).rank)]

    def _looks_after(self, rank: int) -> bool:
        is_of_no_process = rank >= self._num_processes
        return rank == self._rank or (self._rank == 0 and is_of_no_process)

    def require_own_folder(self) -> None:
        """Create the folder before anything is sampled.

        Raises:
            ConfigurationError: an earlier run saved here and this one does not resume it, or the
                folder cannot be created.
        """
        if self._earlier:
            self._refuse(self._earlier[0])
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an operating-system error inside the block into a `ConfigurationError`."""
        try:
            yield
        except OSError as error:
            cause = error.strerror or error
            raise ConfigurationError(
                f"save_rollouts={str(self._folder)!r} cannot be written ({cause}). "
                f"{write_advice(error, self._folder, 'save_rollouts')}"
            ) from error

    def begin_training(self, step: int) -> None:
        """Resume after a checkpoint's step: delete later rollouts, which are sampled again.

        Raises:
            ConfigurationError: a training that starts at step 0 would write into another run's
                files.
        """
        later = [path for path in self._kept_files() if _parts_of(path).step > step]
        if not step:
            self.require_own_folder()
            if later:
                self._refuse(later[0])
        with self._writing():
            for path in later:
                path.unlink()
        self._earlier = []
        # A step that was saved before may be evaluated again.
        for path in self._kept_files():
            self._count = max(self._count, _parts_of(path).number + 1)

    def _refuse(self, path: Path) -> NoReturn:
        raise ConfigurationError(
            f"save_rollouts={str(self._folder)!r} already holds rollouts of another run, such as "
            f"{path.name}; choose an empty folder, or resume that run from its checkpoint before "
            "sampling anything."
        )

    def save(
        self,
        step: int,
        mode: str,
        calls: Sequence[Sequence[GenerationOutput]],
        rewards: Mapping[str, float | None],
    ) -> None:
        """Write a file of the outputs of each call.

        Args:
            step: the trainer's step after it trained on them; in evaluation, at the time.
            mode: "train" or "eval".
            calls: outputs of each call of the engine.
            rewards: reward of each sequence by its request id; None, or left out, if the sequence
                was not scored.

        Raises:
            ConfigurationError: another run, which began after this one, wrote the file; or it
                cannot be written.
        """
        import pyarrow as pa
        import pyarrow.parquet as parquet

        rows: list[dict[str, Any]] = []
        for call, outputs in enumerate(calls):
            for output in outputs:
                reward = rewards.get(output.request_id)
                rows.append(_row(output, call=call, step=step, mode=mode, reward=reward))
        path = self._folder / FILE_NAME.format(step=step, number=self._count, rank=self._rank)
        if path.exists():
            raise ConfigurationError(
                f"{path} exists already, because another run saves its rollouts in the same "
                "folder; set a different save_rollouts for each run."
            )
        self._count += 1
        content = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows, _schema()), content, compression="zstd")
        with self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, content.getvalue())


class SavedRollouts(Sampler):
    """Saved rollouts of an earlier run, from which a trainer trains without an engine.

        attach(trainer, SavedRollouts("rollouts", config))

    The trainer gets the same sequences in the same order as the run that saved them. With the same
    weights, data, seed and settings, its losses are bitwise the same.
    """

    samples_current_policy = False

    def __init__(self, folder: str, config: Any = None) -> None:
        """Find the files of an earlier run.

        Args:
            folder: that run's `save_rollouts` folder.
            config: that run's `RolloutConfig`; the loss uses its settings.

        Raises:
            ConfigurationError: the folder has no rollouts, or `config` saves into the same folder.
        """
        self._config = as_rollout_config(config)
        self.tokenizer = None
        saved_into = self._config.save_rollouts
        if saved_into is not None and Path(saved_into).resolve() == Path(folder).resolve():
            raise ConfigurationError(
                f"save_rollouts={saved_into!r} is the folder that this run trains from; choose "
                "another folder, or leave it out."
            )
        self._policy_version = 0
        self._folder = Path(folder)
        self._rank = 0
        self._calls: Iterator[list[GenerationOutput]] = iter(())
        self._routers: Routers | None = None
        self._durations = Durations()
        self._defaults = SamplingParams()
        if not _files(self._folder):
            raise ConfigurationError(
                f"{folder!r} holds no saved rollouts; pass the folder that an earlier run set as "
                "RolloutConfig(save_rollouts=...)."
            )

    @property
    def config(self) -> RolloutConfig:
        return self._config

    @property
    def policy_version(self) -> int:
        """The newest version that sampled a token of the last rollout."""
        return self._policy_version

    @property
    def defaults(self) -> SamplingParams:
        """Sampling parameters of the trainer; the saved rollouts may have used others."""
        return self._defaults

    @property
    def durations(self) -> Durations:
        return self._durations

    @property
    def routers(self) -> Routers | None:
        return self._routers

    def sampler_for(self, run: TrainingRun) -> Self:
        """Serve one process of a trainer, from the first rollout on."""
        if self.config.router_replay:
            self._routers = routers_of(unwrap(run.model))
        self.set_generation_config(run.generation_config)
        self._rank = run.accelerator.process_index
        self._calls = _calls(_files(self._folder, self._rank))
        return self

    def set_generation_config(self, generation_config: Any) -> None:
        self._defaults = from_generation_config(generation_config, self.config)

    def require_strategy_support(self) -> NoReturn:
        """Raise `ConfigurationError`: the groups were chosen when they were sampled."""
        raise refused("saved rollouts, strategy")

    def begin_training(self, step: int, state: Mapping[str, Any] | None) -> None:
        """Continue with the first rollout after a checkpoint's step; 0: with the next one."""
        if step:
            files = _files(self._folder, self._rank)
            self._calls = _calls(path for path in files if _parts_of(path).step > step)

    def generate_batch(self, inputs: Iterable[Any], *_: Any, **__: Any) -> dict[str, Any]:
        """Return the saved outputs of the next `generate_batch` call.

        Raises:
            ConfigurationError: no call is left, its prompts differ from `inputs`, or its file
                cannot be read.
        """
        outputs = next(self._calls, None)
        if outputs is None:
            raise ConfigurationError(
                f"{self._folder} holds no more rollouts; lower max_steps to the number of steps "
                "that were saved."
            )
        prompts = [item["prompt"] if isinstance(item, Mapping) else item for item in inputs]
        if [output.prompt_ids for output in outputs] != prompts:
            raise ConfigurationError(
                f"the trainer asks for different prompts from those that {self._folder} holds "
                "next; train with the same data, seed, batch sizes, evaluations and number of "
                "processes as the run that sampled them."
            )
        versions: list[int] = []
        for output in outputs:
            versions.extend(version for version, _ in output.policy_versions)
        if versions:
            self._policy_version = max(versions)
        return {output.request_id: output for output in outputs}

    def sync_weights(self, *_: Any) -> SyncReport:
        """Do nothing: saved rollouts do not depend on the current weights."""
        return SyncReport(self.policy_version, 0.0, 0)

    def follow(self, model: torch.nn.Module) -> None:
        """Do nothing: there is no engine."""


def _files(folder: Path, rank: int | None = None) -> list[Path]:
    """Return the files in the order of their rollouts; `rank=None`: those of all processes."""
    files: list[Path] = []
    for path in folder.glob("*.parquet"):
        is_saved_rollout = _NAME.fullmatch(path.name) is not None
        if is_saved_rollout and rank in (None, _parts_of(path).rank):
            files.append(path)
    return sorted(files)


class _FileNameParts(NamedTuple):
    """The numbers in the name of a file."""

    step: int
    number: int
    """Number of the file among those of its rank, from 0."""
    rank: int


def _parts_of(path: Path) -> _FileNameParts:
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    step, number, rank = match.groups()
    return _FileNameParts(step=int(step), number=int(number), rank=int(rank))


def _calls(paths: Iterable[Path]) -> Iterator[list[GenerationOutput]]:
    for path in paths:
        yield from _calls_in(path)


def _calls_in(path: Path) -> list[list[GenerationOutput]]:
    """Return the outputs of each call in a file; `ConfigurationError`: it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            rows = file.read().to_pylist()
        by_call = groupby(rows, itemgetter("call"))
        return [[_output(row) for row in rows_of_call] for _, rows_of_call in by_call]
    except (pa.ArrowException, OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is not a complete file of saved rollouts ({error_text(error)}); restore it "
            "from a copy, or resume the run that saved it from a checkpoint before step "
            f"{_parts_of(path).step}, which samples it again."
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
    if row["finish_reason"] is not None:
        output.finish_reason = FinishReason(row["finish_reason"])
    output.policy_versions = [(version, count) for version, count in row["policy_versions"]]
    if row["kept_token_ids"] is not None:
        output.kept_token_ids = [array("i", ids) for ids in row["kept_token_ids"]]
    if row["routed_experts"] is not None:
        output.routed_experts = np.load(io.BytesIO(row["routed_experts"]))
    return output
