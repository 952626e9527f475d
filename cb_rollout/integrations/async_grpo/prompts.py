"""Yield a data set's prompts endlessly, and know which of them were trained on.

Owns the position at which a resumed run continues. The rollout thread takes prompts and queues
completions; the trainer's thread takes these, and saves and loads the position.
"""

import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cb_rollout.engine.images.processor import is_chat

# Beside the trainer's own files in a checkpoint.
STATE_FILE = "cb_rollout_prompts.json"


class PromptSource:
    """The prompts of a run, as rows of `prompt`, `row` and `index`."""

    def __init__(
        self, dataset: Iterable[Mapping[str, Any]], tokenizer: Any, template_kwargs: Any
    ) -> None:
        """Begin with the first row; a tokenizer renders chats with the template's arguments."""
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        self._lock = threading.Lock()
        self._next_index = 0
        self._open: dict[int, int | None] = {}
        """Completions that the trainer has yet to take, by prompt index; None: still sampled."""
        self._taken: list[int] = []
        """Index of the prompt of each completion that the trainer took, in order."""

    def position(self, num_trained: int) -> int:
        """Return the index of the first prompt without a completion among those trained on."""
        with self._lock:
            untrained = list(self._open) + self._taken[num_trained:]
            return min(untrained, default=self._next_index)

    def state(self) -> dict[str, Any]:
        """Return the prompt to come, and the completions that the trainer has not taken."""
        with self._lock:
            return {"next_index": self._next_index, "open": dict(self._open)}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`, before the first prompt is taken."""
        with self._lock:
            self._next_index = state["next_index"]
            self._open = dict(state["open"])
            self._taken.clear()

    def at(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return prompts that were yielded before, by their index."""
        wanted = set(indices)
        found: dict[int, dict[str, Any]] = {}
        for index, row in enumerate(self._rows()):
            if len(found) == len(wanted):
                break
            if index in wanted:
                found[index] = self._prompt(row, index)
        return [found[index] for index in indices]

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        return itertools.chain.from_iterable(itertools.repeat(self._dataset))

    def _prompt(self, row: Mapping[str, Any], index: int) -> dict[str, Any]:
        return {"prompt": self._rendered(row.get("prompt")), "row": row, "index": index}

    def begin_at(self, position: int) -> None:
        with self._lock:
            self._next_index = position
            self._open.clear()
            self._taken.clear()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in itertools.islice(self._rows(), self._next_index, None):
            with self._lock:
                index = self._next_index
                self._next_index += 1
                self._open[index] = None
            yield self._prompt(row, index)

    def drop(self, index: int) -> None:
        with self._lock:
            self._open.pop(index, None)

    def queue(self, index: int, num_completions: int) -> None:
        with self._lock:
            self._open[index] = num_completions

    def take(self, index: int) -> None:
        with self._lock:
            self._taken.append(index)
            left = self._open.pop(index, None)
            if left is not None and left > 1:
                self._open[index] = left - 1

    def _rendered(self, prompt: Any) -> Any:
        if not (self._template_kwargs and is_chat(prompt)):
            return prompt
        return self._tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **self._template_kwargs,
        )["input_ids"]


class PositionCallback(TrainerCallback):
    """Save the position with each checkpoint, and begin there when training resumes."""

    def __init__(self, source: PromptSource, samples_per_step: int) -> None:
        self._source = source
        self._samples_per_step = samples_per_step
        self._first_step = 0

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            num_trained = (state.global_step - self._first_step) * self._samples_per_step
            content = json.dumps({"position": self._source.position(num_trained)})
            self._file(args, state).write_text(content)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._first_step = state.global_step
        file = self._file(args, state)
        if state.global_step and file.exists():
            self._source.begin_at(json.loads(file.read_text())["position"])

    @staticmethod
    def _file(args: Any, state: Any) -> Path:
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / STATE_FILE
