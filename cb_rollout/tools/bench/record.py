"""What was measured, as JSON beside the documents."""

import json
from pathlib import Path
from typing import Any

from cb_rollout.tools.bench.machine import describe
from cb_rollout.tools.bench.sizes import Setup


def write_record(bench: str, setup: Setup, results: dict[str, Any], folder: Path) -> Path:
    """One file for each bench and kind of device; a later run replaces it."""
    record = {
        "bench": bench,
        **describe(setup.device),
        "repetitions": setup.repetitions,
        "results": results,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bench}_{setup.device}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
