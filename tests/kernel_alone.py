"""Run a tiny rollout in a process in which other rooms of the package cannot be imported.

Usage: kernel_alone.py MODULE... Prints, as JSON, what was sampled and scored, and which of these
modules something asked for.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# What a training loop holds.
KERNEL = ("engine", "rollout.generator", "weights", "packing.logprobs")


class Blocked(MetaPathFinder):
    """Refuses to import some modules, and what lies in them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self.asked: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            prefix = ".".join(parts[:length])
            if prefix in self._names:
                self.asked.append(prefix)
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def rolled_out() -> dict[str, Any]:
    """Return a group's tokens, its log-probabilities, and those of the packed loss."""
    import torch
    from tiny import tiny_model

    from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, packed_logprobs

    model = tiny_model()
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0)) as generator:
        generator.sync_weights()
        answers = generator.generate_batch(
            [[5, 6, 7], [8, 9]], sampling_params=params, num_return_sequences=2
        )
        generator.sleep()
        outputs = list(answers.values())
    with torch.no_grad():
        scored = packed_logprobs(model, outputs)
    return {
        "tokens": [output.generated_tokens for output in outputs],
        "logprobs": [output.logprobs for output in outputs],
        "scored": [values.tolist() for values in scored],
    }


def main(names: Sequence[str]) -> None:
    """Print what runs without these modules."""
    blocked = Blocked(names)
    sys.meta_path.insert(0, blocked)
    for name in KERNEL:
        importlib.import_module(f"cb_rollout.{name}")
    found = rolled_out()
    asked = list(blocked.asked)
    refused: list[str] = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            refused.append(name)
    sys.stdout.write(json.dumps({**found, "asked": asked, "refused": refused}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
