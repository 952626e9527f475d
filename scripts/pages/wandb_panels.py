"""Print or save the panels of a wandb workspace for rollouts, one section a group of metrics.

    python scripts/pages/wandb_panels.py                               # print them, as JSON
    python scripts/pages/wandb_panels.py --entity ME --project MINE    # save them as a workspace

Saving needs the network, an account, and `pip install wandb-workspaces`; printing needs nothing.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.metrics_table import METRICS

WORKSPACE = "Rollouts"
# Metrics of TRL that belong beside the rollout's.
TRAINERS_OWN = {
    "Reward": ["reward", "reward_std", "eval_reward"],
    "Drift": ["sampling/sampling_logp_difference/max", "sampling/importance_sampling_ratio/mean"],
}


def sections() -> list[dict[str, Any]]:
    """Return each section with its line plots over the trainer's step."""
    names: dict[str, list[str]] = {panel: list(own) for panel, own in TRAINERS_OWN.items()}
    for metric in METRICS:
        names.setdefault(metric.panel, []).append(metric.name)
    return [
        {"name": panel, "panels": [{"x": "train/global_step", "y": [_logged(n)]} for n in found]}
        for panel, found in names.items()
    ]


def _logged(name: str) -> str:
    """Return the name under which the trainer's wandb callback logs a scalar."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def save(entity: str, project: str) -> str:
    """Save the workspace and return its URL."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        sys.exit("saving needs wandb-workspaces: pip install wandb-workspaces")
    workspace = workspaces.Workspace(
        name=WORKSPACE,
        entity=entity,
        project=project,
        sections=[
            workspaces.Section(
                name=section["name"],
                panels=[reports.LinePlot(x=p["x"], y=p["y"]) for p in section["panels"]],
                is_open=True,
            )
            for section in sections()
        ],
    )
    workspace.save()
    return workspace.url


def main() -> None:
    """Print the panels, or save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entity", help="entity of the workspace; with --project")
    parser.add_argument("--project", help="project of the workspace; with --entity")
    arguments = parser.parse_args()
    if bool(arguments.entity) != bool(arguments.project):
        parser.error("--entity and --project go together")
    if arguments.entity:
        print(save(arguments.entity, arguments.project))
    else:
        print(json.dumps({"name": WORKSPACE, "sections": sections()}, indent=2))


if __name__ == "__main__":
    main()
