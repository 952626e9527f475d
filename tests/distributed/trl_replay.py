"""One process of several that train attached trainers, and stock ones on what these sampled.

Run by `processes.run_processes`, with the folder of saved models, and names of settings of
`pages.replay_table.REPLAYS`.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from replay import create_trainer, train_attached, train_stock

from pages.replay_table import REPLAYS

SETTINGS = {setting.name: setting for setting in REPLAYS}


def replayed(name: str, folder: Path, models: Path) -> dict[str, Any]:
    """Return the differences of a setting's two trainings."""
    setting = SETTINGS[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        ours = create_trainer(setting, folder / "ours", models, monkeypatch)
        trained = train_attached(ours, setting)
        theirs = create_trainer(setting, folder / "theirs", models, monkeypatch)
        other = train_stock(theirs, setting, trained.turns)
    return {
        "num_processes": theirs.accelerator.num_processes,
        "weights": other.distance(trained),
        "change": other.change(),
        "metrics": other.metric_distances(trained),
    }


def main() -> None:
    """Write what was found of each setting."""
    models, *names, path = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / os.environ["RANK"]
        found = {
            name: replayed(name, folder / str(number), Path(models))
            for number, name in enumerate(names)
        }
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
