"""`cb-rollout bench`: compare the speed of a rollout with other generators on this machine."""

import argparse
import sys
from collections import defaultdict
from statistics import median
from typing import Any

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import add_json, whole_number, write_json

DESCRIPTION = """\
Time a rollout of groups with long-tailed lengths by cb_rollout, by transformers' continuous
batching and by model.generate. All run in this process and take turns; figures are medians, and
only ratios within one run mean anything. A checkout has more workloads, and vLLM:
`python scripts/bench.py --help`."""


def add_bench(commands: Any) -> None:
    """Add the command to the command line."""
    text = "time a rollout beside its peers"
    parser = commands.add_parser("bench", help=text, description=DESCRIPTION)
    text = "a checkpoint's directory or hub name (random weights, small on a CPU, 0.6b on a GPU)"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
    text = "turns of each contender (3)"
    parser.add_argument("--repetitions", type=whole_number, metavar="N", default=3, help=text)
    text = "sequences of a batch of model.generate (64)"
    parser.add_argument("--batch-size", type=whole_number, metavar="N", default=64, help=text)
    text = "auto: a GPU where there is one"
    parser.add_argument("--device", default="auto", help=text)
    add_json(parser)
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> int:
    for option in ("repetitions", "batch_size"):
        value = getattr(arguments, option)
        if value < 1:
            raise ConfigurationError(f"{option}={value} is below 1.")
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.bench import turns

    rates: defaultdict[str, list[float]] = defaultdict(list)
    all_turns = turns(
        arguments.model, arguments.device, arguments.repetitions, arguments.batch_size
    )
    for name, rate in all_turns:
        rates[name].append(rate)
        print(f"{name:<18}{rate:>10,.1f} tokens/s", file=sys.stderr, flush=True)
    medians = {name: median(values) for name, values in rates.items()}
    if arguments.is_json:
        write_json({"unit": "tokens_per_second", **medians})
        return 0
    for name, rate in medians.items():
        times = medians["cb_rollout"] / rate
        print(f"{name:<18}{rate:>10,.1f} tokens/s  cb_rollout is {times:.2f}x")
    return 0
