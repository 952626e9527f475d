"""One process of two that train under strategies, whole and resumed from a checkpoint.

Run by `processes.run_processes`, with the names of the strategies.
"""

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import torch
from exact_runs import STRATEGIES, Run
from trl_sharded import STUCK_SECONDS

# A generation of two steps: the first checkpoint is amid one.
DIVIDED = {"steps_per_generation": 2, "per_device_train_batch_size": 2}
STEPS = (1, 4)


def noted(run: Run) -> dict[str, Any]:
    weights = torch.cat([weight.flatten() for weight in run.weights.values()])
    return {"rows": [row._asdict() for row in run.trained], "weights": weights.tolist()}


def main() -> None:
    """Train under every strategy that was named."""
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    *names, path = sys.argv[1:]
    folder = Path(path).parent
    results: dict[str, Any] = {}
    for name in names:
        strategy = STRATEGIES[name]
        saving = {"save_strategy": "steps", "save_steps": 1}
        whole = Run(folder / name, strategy, **saving, **DIVIDED)
        results[name] = {"whole": noted(whole)}
        for step in STEPS:
            checkpoint = folder / name / f"checkpoint-{step}"
            resumed = Run(folder / f"{name}-{step}", strategy, resume=checkpoint, **DIVIDED)
            results[name][str(step)] = noted(resumed)
    Path(path).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
