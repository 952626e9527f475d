"""One process of two that train an epoch with strategies, stopped at a checkpoint and resumed.

Run by `processes.run_processes`, with the names of the ways to try.
"""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
from counted_rows import resumed_rows, trained_rows
from trl_sharded import STUCK_SECONDS

from cb_rollout.strategies import DynamicSampling, OverSampling, PartialRollouts

# Six generations an epoch.
STOPPED_AT = 3

WAYS: dict[str, Any] = {
    "partial": PartialRollouts(num_extra_groups=3, max_staleness=3),
    "over": OverSampling(num_extra_groups=3),
    "dynamic": DynamicSampling(max_dropped_groups=8),
}


def often_equal(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """No advantage where the first summand is even."""
    return [
        float(len(completion)) if int(prompt[0]) % 2 else 1.0
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def main() -> None:
    """Train every way that was named, whole and resumed."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    *ways, path = sys.argv[1:]
    results: dict[str, Any] = {}
    for way in ways:
        settings: dict[str, Any] = {"reward": often_equal} if way == "dynamic" else {}
        folder = Path(path).parent / way
        results[way] = {
            "whole": trained_rows(folder / "whole", WAYS[way], **settings),
            "resumed": resumed_rows(folder / "resumed", WAYS[way], STOPPED_AT, **settings),
        }
    Path(path).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
