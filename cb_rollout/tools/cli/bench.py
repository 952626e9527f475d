"""`cb-rollout bench`: time cb_rollout against other generators on this machine."""

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.cli.command import require_packages, require_writable


class BenchCommand(NamedTuple):
    """The function `bench_NAME` of a module of `cb_rollout.tools.bench`, and its own packages."""

    module: str
    help: str
    packages: tuple[str, ...] = ()


WORKLOADS = {
    "rollout": BenchCommand("rollout", "one rollout: prompts in, completions out"),
    "bfloat16": BenchCommand("rollout", "one rollout of the same weights in 16 bits and in 32"),
    "bitwise": BenchCommand(
        "step", "what numerics='bitwise' costs, in rollout and step", ("datasets", "trl")
    ),
    "step": BenchCommand("step", "one GRPO step through TRL", ("datasets", "trl")),
    "sync": BenchCommand("sync", "a weight sync, beside bare tensor copies"),
    "strategies": BenchCommand("strategies", "over-sampling and its like, against plain"),
    "pool": BenchCommand("cluster.pool", "a pool of workers, beside an engine", ("ray",)),
    "simulate": BenchCommand(
        "cluster.simulate", "steps on several engines: predicted, measured, and scenarios", ("ray",)
    ),
    "serve": BenchCommand(
        "rollout", "the same requests over HTTP on this machine", ("fastapi", "httpx", "uvicorn")
    ),
    "scaling": BenchCommand("scaling", "from one request at once to 1,024"),
    "drafts": BenchCommand("rollout", "few requests with drafts, and without"),
    "truncation": BenchCommand(
        "truncation", "top-k, top-p and min-p, beside transformers' warpers"
    ),
    "profile": BenchCommand("profile", "where a rollout's time goes"),
    "bookkeeping": BenchCommand("profile", "what a decode step takes beside its forward"),
    "roofline": BenchCommand("roofline.machine", "what this machine can do at most"),
    "gpu_compiled": BenchCommand(
        "roofline.compiled",
        "kernels of a captured decode step, compiled and not, counted without a GPU",
        ("triton",),
    ),
    "gpu_model": BenchCommand(
        "roofline.gpu_model",
        "kernels of a step on a GPU, counted without one, and a model of their time",
        ("triton",),
    ),
}

ENGINE_PACKAGES = ("psutil", "tokenizers", "torch", "transformers")

# The sizes of each are in `cb_rollout.tools.bench.workload`, which loads torch.
MODELS = ("small", "135m", "0.6b")

OUTPUT_DIR = Path("cb_rollout_bench")

DESCRIPTION = """\
Time cb_rollout beside its peers and write what was measured as JSON. Models have random weights;
nothing is downloaded. All contenders run in this process, except vLLM, which `rollout` starts where
CB_ROLLOUT_VLLM_PYTHON names the Python of an environment with vLLM.

Contenders take turns, so that a slow spell of the machine meets all of them; figures are medians
over the repetitions, and only ratios within one run mean anything."""


def add_bench(commands: Any) -> None:
    """Add the command to the command line."""
    width = max(map(len, WORKLOADS))
    lines = "".join(f"\n  {name:<{width}}  {x.help}" for name, x in WORKLOADS.items())
    parser = commands.add_parser(
        "bench",
        help="time a rollout beside its peers",
        description=DESCRIPTION,
        epilog=f"workloads:{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workload",
        metavar="NAME",
        nargs="?",
        choices=WORKLOADS,
        default="rollout",
        help="one of the workloads below (rollout)",
    )
    parser.add_argument(
        "--repetitions", type=int, metavar="N", default=3, help="turns of each contender (3)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="of model.generate in rollout and scaling (each workload's own)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU where there is one",
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        type=Path,
        help="where NAME_DEVICE.json, with --model NAME_MODEL_DEVICE.json, is written over an "
        f"older one; made if missing ({OUTPUT_DIR})",
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--model",
        choices=MODELS,
        help="sizes of the model and the workload (small on a CPU, 0.6b on a GPU)",
    )
    sizes.add_argument(
        "--tiny",
        action="store_true",
        help="see whether a workload runs; its figures say nothing of speed",
    )
    parser.set_run(_run)


def _run(arguments: argparse.Namespace) -> int:
    name, folder = arguments.workload, arguments.output_dir or OUTPUT_DIR
    for option in ("repetitions", "batch_size"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise ConfigurationError(f"--{option.replace('_', '-')} {value} is below 1.")
    if arguments.tiny and arguments.output_dir is None:
        raise ConfigurationError(
            "--tiny says nothing of speed; give it an --output-dir of its own."
        )
    packages = (*ENGINE_PACKAGES, *WORKLOADS[name].packages)
    require_packages(f"the bench {name!r}", packages, "'cb_rollout[bench]'")
    require_writable(folder)
    # Imported late: torch and transformers take seconds to load.
    from cb_rollout.tools.bench.run import run_workload

    path = run_workload(
        name,
        WORKLOADS[name].module,
        device=arguments.device,
        model=arguments.model,
        repetitions=arguments.repetitions,
        batch_size=arguments.batch_size,
        is_tiny=arguments.tiny,
        folder=folder,
    )
    sys.stdout.write(f"\nwritten to {path}\n")
    return 0
