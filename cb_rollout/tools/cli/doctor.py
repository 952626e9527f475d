"""`cb-rollout doctor`: check a machine and a checkpoint, and print a line for each finding."""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import (
    EXIT_PARTLY,
    add_fields,
    add_json,
    real_number,
    whole_number,
    write_json,
)
from cb_rollout.tools.dataset.options import DatasetOptions

if TYPE_CHECKING:
    from cb_rollout.tools.doctor import Finding

VERDICTS = ("usable", "usable, with the warnings above", "not usable, for the reason above")


def add_doctor(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine, and a checkpoint",
        description="Check what a rollout needs: versions, device, memory; with MODEL also what "
        "its layers keep, how much memory they get, which paths they run by, and that it generates "
        "what its own forward says. With --gpu-gib, the memory of a GPU that need not be here is "
        "computed from the config of MODEL alone. Exit code 1: not usable, and why.",
    )
    text = "a checkpoint's directory or hub name"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same")
    text = (
        "try what MODEL runs by in a process of its own again, whatever earlier trials showed, and "
        "keep the verdicts for later runs"
    )
    parser.add_argument("--qualify", action="store_true", help=text)
    text = "plan a GRPO step on a GPU of so much memory"
    parser.add_argument("--gpu-gib", type=real_number, metavar="N", help=text)
    text = "of the adapters that it trains; 0: it trains all weights (0)"
    parser.add_argument("--lora", type=whole_number, default=0, metavar="RANK", help=text)
    text = "of its micro-batch, each prompt once (17184: 4 prompts of 200, 32 answers of 512)"
    parser.add_argument("--loss-tokens", type=whole_number, default=17_184, metavar="N", help=text)
    add_fields(parser, DatasetOptions, names=("max_memory_percent", "dtype", "device"))
    add_json(parser)
    parser.set_run(lambda arguments: _run(arguments, parser.in_options))


def _run(arguments: argparse.Namespace, in_options: Callable[[str], str]) -> int:
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.doctor import Level

    worst = Level.OK
    rows: list[dict[str, str]] = []
    for finding in _findings(arguments):
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


def _findings(arguments: argparse.Namespace) -> "Iterator[Finding]":
    """Return the findings that the options ask for; ConfigurationError if options conflict."""
    from cb_rollout.tools import doctor

    model = arguments.model or arguments.named_model
    if arguments.gpu_gib is not None:
        _check_plan_options(model, arguments)
        return doctor.computed_findings(
            name=model,
            gpu_gib=arguments.gpu_gib,
            lora_rank=arguments.lora,
            loss_tokens=arguments.loss_tokens,
            dtype=arguments.dtype,
            percent=arguments.max_memory_percent,
        )
    of_machine = doctor.machine_findings(arguments.device)
    if model is None:
        if arguments.qualify:
            raise ConfigurationError("--qualify takes a MODEL, whose paths it tries.")
        return of_machine
    of_checkpoint = doctor.checkpoint_findings(
        model,
        arguments.dtype,
        arguments.max_memory_percent,
        device=arguments.device,
        qualifies=arguments.qualify,
    )
    return chain(of_machine, of_checkpoint)


def _check_plan_options(model: str | None, arguments: argparse.Namespace) -> None:
    """Raise `ConfigurationError` for options from which no plan of a GPU can be computed."""
    if model is None:
        raise ConfigurationError("--gpu-gib takes a MODEL, whose config it reads.")
    if arguments.qualify:
        raise ConfigurationError("--gpu-gib computes and --qualify runs; give one of the two.")
    for option in ("lora", "loss_tokens"):
        value = getattr(arguments, option)
        if value < 0:
            raise ConfigurationError(f"{option}={value} is below 0.")
    if not 0 < arguments.gpu_gib < math.inf:
        raise ConfigurationError(f"--gpu-gib {arguments.gpu_gib} is not a GPU's memory in GiB.")
