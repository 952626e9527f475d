"""`cb-rollout doctor`: check a machine and a checkpoint, a line for each finding."""

import argparse
from collections.abc import Callable
from itertools import chain
from typing import Any

from cb_rollout.tools.cli.command import EXIT_PARTLY, add_json, write_json

VERDICTS = ("usable", "usable, with the warnings above", "not usable, for the reason above")


def add_doctor(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and a checkpoint",
        description="Check what a rollout needs: versions, device, memory; with MODEL also what "
        "its layers keep, how much memory they get, which paths they run by, and that it generates "
        "what its own forward says. Exit code 1: not usable, and why.",
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a checkpoint's directory or hub name"
    )
    parser.add_argument("--dtype", default="auto", help="of the weights (auto: the checkpoint's)")
    parser.add_argument("--device", default="auto", help="auto: a GPU where there is one")
    parser.add_argument(
        "--max-memory-percent",
        type=float,
        default=0.8,
        help="share of the free memory that the KV cache may take (0.8)",
    )
    add_json(parser)
    parser.set_run(lambda arguments: _run(arguments, parser.in_options))


def _run(arguments: argparse.Namespace, in_options: Callable[[str], str]) -> int:
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.doctor import Level, checkpoint_findings, machine_findings

    worst, rows, findings = Level.OK, [], machine_findings(arguments.device)
    if arguments.model is not None:
        options = ("dtype", "device", "max_memory_percent")
        given = {name: getattr(arguments, name) for name in options}
        findings = chain(findings, checkpoint_findings(arguments.model, **given))
    for finding in findings:
        worst = max(worst, finding.level)
        if arguments.is_json:
            text = in_options(" ".join(finding.text.split()))
            rows.append({"level": finding.level.name.lower(), "name": finding.name, "text": text})
        else:
            print(in_options(str(finding)), flush=True)
    if arguments.is_json:
        write_json({"is_usable": worst is not Level.BAD, "findings": rows})
    else:
        print(f"\n{VERDICTS[worst]}")
    return EXIT_PARTLY if worst is Level.BAD else 0
