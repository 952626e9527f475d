"""Run any workload and write the record that the documents are made from.

    python scripts/bench.py rollout            # into docs/benchmarks/, or --output-dir DIR
    python scripts/bench.py --help             # every workload and option

The workloads are in `scripts/benchmarks/`.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import CommandParser, require_packages, require_writable


class BenchCommand(NamedTuple):
    """The module of a function `bench_NAME`, its own packages, and what installs them."""

    module: str
    help: str
    packages: tuple[str, ...] = ()
    requirement: str = "cb_rollout"


PACKAGES = ("psutil", "tokenizers", "torch", "transformers")

# The module of their sizes loads torch.
MODELS = ("small", "135m", "0.6b")

TRAINING_PACKAGES = ("datasets", "trl")

BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"

RAY = "'cb_rollout[ray]'"

REAL_WEIGHTS = ((*TRAINING_PACKAGES, "gguf", "reasoning_gym"), "gguf reasoning-gym")

WORKLOADS = {
    "rollout": BenchCommand("benchmarks.rollout", "one rollout: prompts in, completions out"),
    "bfloat16": BenchCommand(
        "benchmarks.rollout", "one rollout of the same weights in 16 bits and in 32"
    ),
    "bitwise": BenchCommand(
        "benchmarks.step", "what numerics='bitwise' costs, in rollout and step", TRAINING_PACKAGES
    ),
    "step": BenchCommand("benchmarks.step", "one GRPO step through TRL", TRAINING_PACKAGES),
    "chats": BenchCommand(
        "benchmarks.chats", "64 chats of SmolLM2-135M-Instruct in its own lengths", *REAL_WEIGHTS
    ),
    "chats_long": BenchCommand(
        "benchmarks.chats", "its chats with prompts of 1,000 tokens", *REAL_WEIGHTS
    ),
    "chats_tail": BenchCommand(
        "benchmarks.chats", "its chats of up to 1,024 tokens", *REAL_WEIGHTS
    ),
    "chat_step": BenchCommand(
        "benchmarks.chats", "one GRPO step of SmolLM2-135M-Instruct", *REAL_WEIGHTS
    ),
    "sync": BenchCommand("benchmarks.sync", "a weight sync, beside bare tensor copies"),
    "deltas": BenchCommand(
        "benchmarks.deltas",
        "bytes of a pool's weight sync: whole, as a delta, adapters alone",
        (*REAL_WEIGHTS[0], "peft"),
        REAL_WEIGHTS[1],
    ),
    "strategies": BenchCommand(
        "benchmarks.strategies", "over-sampling and its like, against plain"
    ),
    "pool": BenchCommand(
        "benchmarks.cluster.pool", "a pool of workers, beside an engine", ("ray",), RAY
    ),
    "simulate": BenchCommand(
        "benchmarks.cluster.simulate",
        "steps on several engines: predicted, measured, and scenarios",
        ("ray",),
        RAY,
    ),
    "serve": BenchCommand(
        "benchmarks.rollout",
        "the same requests over HTTP on this machine",
        ("fastapi", "httpx", "uvicorn"),
        "'cb_rollout[server]' httpx",
    ),
    "scaling": BenchCommand("benchmarks.scaling", "from one request at once to 1,024"),
    "truncation": BenchCommand(
        "benchmarks.truncation", "top-k, top-p and min-p, beside transformers' warpers"
    ),
    "profile": BenchCommand("benchmarks.profile", "where a rollout's time goes"),
    "bookkeeping": BenchCommand(
        "benchmarks.profile",
        "what a decode step takes beside its forward, and exported by OpenTelemetry",
        ("opentelemetry",),
        "'cb_rollout[otel]'",
    ),
    "roofline": BenchCommand("benchmarks.roofline.machine", "what this machine can do at most"),
    "gpu_compiled": BenchCommand(
        "benchmarks.roofline.compiled",
        "kernels of a captured decode step, compiled and not, counted without a GPU",
        ("triton",),
        "triton",
    ),
    "gpu_model": BenchCommand(
        "benchmarks.roofline.gpu_model",
        "kernels of a step on a GPU, counted without one, and a model of their time",
        ("triton",),
        "triton",
    ),
}

DESCRIPTION = """\
Time cb_rollout beside its peers and write what was measured as JSON. Models have random
weights, or are SmolLM2 itself; nothing is downloaded.
All contenders run in this process, except vLLM, which `rollout` starts where CB_ROLLOUT_VLLM_PYTHON
names the Python of an environment with vLLM."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one workload and return the exit code."""
    width = max(map(len, WORKLOADS))
    lines = "".join(f"\n  {name:<{width}}  {x.help}" for name, x in WORKLOADS.items())
    parser = CommandParser("scripts/bench.py", description=DESCRIPTION, epilog=f"workloads:{lines}")
    parser.add_argument(
        "workload",
        metavar="NAME",
        nargs="?",
        choices=WORKLOADS,
        default="rollout",
        help="one of the workloads below (rollout)",
    )
    _add_options(parser)
    parser.set_run(_run)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def _add_options(parser: CommandParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "turns of each contender (3)"
    parser.add_argument("--repetitions", type=int, metavar="N", default=3, help=text)
    text = "of model.generate (each workload's own)"
    parser.add_argument("--batch-size", type=int, metavar="N", help=text)
    devices, text = ("auto", "cpu", "cuda"), "auto: a GPU where there is one"
    parser.add_argument("--device", choices=devices, default="auto", help=text)
    text = (
        "where NAME_DEVICE.json, with --model NAME_MODEL_DEVICE.json, is written over an older "
        f"one; made if missing ({BENCHMARKS})"
    )
    parser.add_argument("--output-dir", metavar="DIR", type=Path, help=text)
    either = parser.add_mutually_exclusive_group()
    text = "sizes of the model and the workload (small on a CPU, 0.6b on a GPU)"
    either.add_argument("--model", choices=MODELS, help=text)
    text = "see whether a workload runs; its figures say nothing of speed"
    either.add_argument("--tiny", action="store_true", help=text)


def _run(arguments: argparse.Namespace) -> int:
    name, command = arguments.workload, WORKLOADS[arguments.workload]
    folder = arguments.output_dir or BENCHMARKS
    for option in ("repetitions", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option.replace('_', '-')} {value} is below 1.")
    if arguments.tiny and arguments.output_dir is None:
        raise ConfigurationError("--tiny says nothing of speed; give it an --output-dir.")
    require_packages(f"the bench {name!r}", PACKAGES, "cb_rollout")
    require_packages(f"the bench {name!r}", command.packages, command.requirement)
    require_writable(folder)
    print(f"\nwritten to {run_workload(name, command.module, arguments, folder)}")
    return 0


def run_workload(name: str, module: str, options: argparse.Namespace, folder: Path) -> Path:
    """Run `bench_NAME` of a module, print its table, and return the path of its record.

    Raises:
        ConfigurationError: the device is missing.
    """
    # Imported late: torch and transformers take seconds to load, and packages may be missing.
    from benchmarks.harness.records import write_record
    from benchmarks.harness.table import print_table
    from benchmarks.harness.workload import DEFAULT_MODELS
    from benchmarks.sizes import MODELS, TINY, Setup
    from cb_rollout.rollout.checkpoint import torch_device

    device = torch_device(options.device).type
    model = options.model or DEFAULT_MODELS[device]
    sizes = TINY if options.tiny else MODELS[model]
    implementation = importlib.import_module(module)
    setup = Setup(
        device=device, repetitions=options.repetitions, sizes=sizes, batch_size=options.batch_size
    )
    results = getattr(implementation, f"bench_{name}")(setup)
    # What a reader must know of all figures of the module.
    note = getattr(implementation, "NOTE", None)
    if note:
        print(f"\n{note}")
    print_table(results)
    return write_record(name, model, results, device, setup.repetitions, folder, note)


if __name__ == "__main__":
    sys.exit(main())
