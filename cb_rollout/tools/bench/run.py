"""One workload: run, shown as a table, kept as JSON."""

import importlib
from pathlib import Path

from cb_rollout.rollout.checkpoint import torch_device
from cb_rollout.tools.bench.record import write_record
from cb_rollout.tools.bench.sizes import CPU, GPU, TINY, Setup
from cb_rollout.tools.bench.table import print_table


def run_workload(
    name: str,
    *,
    device: str,
    repetitions: int,
    batch_size: int | None,
    is_tiny: bool,
    folder: Path,
) -> Path:
    """Run one workload, print its table and write its JSON.

    Args:
        name: the workload's module.
        device: "auto", "cpu" or "cuda".
        repetitions: turns of each contender.
        batch_size: of `model.generate`; None: each workload's own.
        is_tiny: whether sizes are those that say nothing of speed.
        folder: where the JSON is written.

    Returns:
        The file.

    Raises:
        ConfigurationError: the device is not there.
    """
    kind = torch_device(device).type
    setup = Setup(
        device=kind,
        repetitions=repetitions,
        sizes=TINY if is_tiny else CPU if kind == "cpu" else GPU,
        batch_size=batch_size,
    )
    # A workload's own imports, trl's for one, are for it alone.
    results = importlib.import_module(f"cb_rollout.tools.bench.{name}").bench(setup)
    print_table(results)
    return write_record(name, setup, results, folder)
