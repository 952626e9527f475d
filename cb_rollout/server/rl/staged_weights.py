"""Check the tensors of a weight update by name, shape and dtype, and keep them until the write.

Reads safetensors only, never a pickle. Called on the thread of weight updates.
"""

import copy
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from cb_rollout.compat import torch as torch_compat
from cb_rollout.errors import WeightSyncError, abbreviated, error_text


class StagedWeights:
    """The tensors of one update for a model; only `write` changes the model.

    With `is_partial`, tensors that are not sent keep their values; otherwise all must be sent.
    """

    def __init__(self, model: PreTrainedModel, is_partial: bool = False) -> None:
        self._model = model
        self._is_partial = is_partial
        self.update_id = uuid.uuid4().hex
        # Tied tensors are listed under each of their names; buffers that no checkpoint has are not
        # listed.
        self._targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self.tensors: dict[str, torch.Tensor] = {}
        # The first staged name of each target, by the target's id.
        self._staged_names: dict[int, str] = {}

    def require_fit(self, tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> None:
        """Raise `WeightSyncError` for tensors, given by name, dtype and shape, that do not fit."""
        faults = []
        seen = set(self.tensors)
        for name, dtype, shape in tensors:
            target = self._targets.get(name)
            if target is None:
                faults.append(f"{name}: not in the model")
            elif name in seen:
                faults.append(f"{name}: sent twice")
            elif tuple(shape) != tuple(target.shape):
                sizes = f"{tuple(shape)} was sent, {tuple(target.shape)} is in the model"
                faults.append(f"{name}: {sizes}")
            elif dtype.is_floating_point != target.is_floating_point():
                faults.append(f"{name}: {dtype} was sent, {target.dtype} is there")
            seen.add(name)
        if faults:
            raise WeightSyncError(f"{len(faults)} tensors do not fit: {abbreviated(faults)}.")

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stage tensors by name; raise `WeightSyncError` for one that does not fit the model."""
        for name, tensor in tensors:
            self.require_fit([(name, tensor.dtype, tensor.shape)])
            tied = self._staged_names.setdefault(id(self._targets[name]), name)
            if tied != name and not torch.equal(tensor, self.tensors[tied]):
                raise WeightSyncError(
                    f"{tied} and {name} are one tensor of the model, and different values were "
                    "sent; send equal ones, or serve a checkpoint in which they are not tied."
                )
            self.tensors[name] = tensor

    def require_whole(self, half_written: Iterable[str]) -> None:
        """Raise `WeightSyncError` if a tensor is missing that must be sent.

        All parameters must be sent unless the update is partial, and always the tensors in
        `half_written`. Of tied tensors, one is enough.
        """
        parameters = []
        for name, target in self._targets.items():
            if isinstance(target, torch.nn.Parameter):
                parameters.append(name)
        missing = self._missing(parameters)
        if missing and not self._is_partial:
            raise WeightSyncError(
                f"{len(missing)} of {len(self._targets)} tensors were not sent: "
                f"{abbreviated(missing)}; send all, or begin the update with partial=true."
            )
        missing = self._missing(half_written)
        if missing:
            raise WeightSyncError(
                f"{len(missing)} tensors were not sent that the failed update before may have left "
                f"half written: {abbreviated(missing)}; send them too."
            )

    def _missing(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if id(self._targets[name]) not in self._staged_names]

    @torch.no_grad()
    def write(self) -> None:
        for name, tensor in self.tensors.items():
            self._targets[name].copy_(tensor)

    def add_files(
        self, path: str, paused: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        """Stage the tensors of a safetensors file, or of a checkpoint's directory.

        A checkpoint with other names than the model's is loaded by transformers, which converts it.
        `paused` keeps the process from computing meanwhile, because loading changes the default
        dtype. Raises `WeightSyncError` for a file that is missing or cut off, and for a tensor that
        does not fit.
        """
        with _files(path) as files:
            if self.needs_conversion(Path(path), files):
                with paused():
                    self.add(self._converted(path))
            else:
                for file in files:
                    self.add(_tensors(file))

    def needs_conversion(self, path: Path, files: Sequence[Path]) -> bool:
        """Return whether a checkpoint's directory has other names than the model."""
        names: set[str] = set()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        return path.is_dir() and not names <= self._targets.keys()

    def _converted(self, directory: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a checkpoint's tensors as transformers names them; raise if names do not match."""
        model_class: Any = torch_compat.plain_class(self._model)
        try:
            with torch.random.fork_rng(devices=[]):
                loaded, report = model_class.from_pretrained(
                    directory,
                    config=copy.deepcopy(self._model.config),
                    dtype=self._model.dtype,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except Exception as error:
            raise WeightSyncError(
                f"{directory!r} is no checkpoint of this model ({error_text(error)})."
            ) from error
        for fault in ("missing_keys", "unexpected_keys"):
            names = sorted(report[fault])
            if names:
                raise WeightSyncError(
                    f"{directory!r} has {len(names)} {fault.replace('_', ' ')} for this "
                    f"model: {abbreviated(names)}."
                )
        yield from loaded.state_dict().items()


@contextmanager
def _files(name: str) -> Iterator[list[Path]]:
    """Yield the files of a path; raise `WeightSyncError` if they cannot be read."""
    path = Path(name)
    try:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
            raise WeightSyncError(
                f"{name!r} is no .safetensors file, and no directory with one, on the server's "
                "machine; other formats are not read."
            )
        yield files
    except (SafetensorError, OSError) as error:
        raise WeightSyncError(
            f"{name!r} could not be read ({error_text(error)}); a file may be cut off, or no "
            "safetensors."
        ) from error


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  it is no dictionary
            # The file may be removed or rewritten before the update is written.
            yield name, opened.get_tensor(name).clone()
