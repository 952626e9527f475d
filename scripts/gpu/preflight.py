"""Try what the GPU path needs of a machine, each in a process of its own: seconds in all.

    python scripts/gpu/preflight.py                  # all checks, side by side
    python scripts/gpu/preflight.py capture inductor # these

Prints a line for each check as it ends: what it found, or its error. A check that fails, hangs or
ends its process says nothing about the others. The exit status is 1 if one failed.
"""

import argparse
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Each check imports what it needs in its own process: this one starts them at once.
if TYPE_CHECKING:
    from torch import Tensor

# Seconds from the start until a check that has not ended is killed.
SECONDS = 18.0

DEVICE = "cuda:0"

PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "peft", "numpy")

# Rounding of bfloat16 outputs of order one, and of gradients that are sums of such.
OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 0.02, 0.1

# Query and key heads, and the size of a head.
HEADS, KEY_HEADS, HEAD_SIZE = 8, 2, 128


def versions() -> str:
    """Name the versions of Python and of the packages, and what torch says of the card."""
    import torch

    found = [f"python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    found.append(f"CUDA {torch.version.cuda}")
    if torch.cuda.is_available():
        capability = ".".join(str(number) for number in torch.cuda.get_device_capability(DEVICE))
        found.append(f"{torch.cuda.get_device_name(DEVICE)}, capability {capability}")
    return ", ".join(found)


def driver() -> str:
    """Return the driver's table."""
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=True)
    return "\n" + done.stdout.rstrip()


def triton_kernel() -> str:
    """Compile a Triton kernel with a mask, and compare what it writes."""
    import torch

    from gpu.doubling import double

    numbers = torch.arange(1000, dtype=torch.float32, device=DEVICE)
    doubled = torch.full_like(numbers, -1)
    double(numbers, doubled, 999)
    expected = 2 * numbers
    expected[999] = -1
    torch.testing.assert_close(doubled, expected)
    return "1,000 numbers as expected"


def capture() -> str:
    """Capture a product as a CUDA graph, as the engine captures, and replay it on new numbers."""
    import torch

    from cb_rollout.engine.cuda_graphs import graphs

    device = torch.device(DEVICE)
    weight = torch.randn(64, 64, device=device)
    inputs = torch.randn(4, 64, device=device)
    replay = graphs.CudaCapture(device)(lambda: inputs @ weight)
    inputs.copy_(torch.randn_like(inputs))
    torch.testing.assert_close(replay(), inputs @ weight)
    return "a replay reads new numbers"


def inductor() -> str:
    """Compile a traced graph as the engine compiles its steps, and compare two sizes."""
    import torch

    from cb_rollout.compat.inductor import compile_graph, trace_graph

    def normed(states: "Tensor") -> "Tensor":
        scale = states.float().square().mean(-1, keepdim=True).rsqrt()
        return torch.nn.functional.silu(states * scale)

    module, _ = trace_graph(normed, torch.randn(3, 128, device=DEVICE))
    compiled = compile_graph(module.graph)
    for num_rows in (64, 5):
        states = torch.randn(num_rows, 128, device=DEVICE)
        torch.testing.assert_close(compiled(states), normed(states))
    return "two sizes as expected"


def varlen() -> str:
    """Compare PyTorch's varlen kernel with sdpa, forward and backward, with grouped heads."""
    return _compare_varlen((7, 33, 150), (0, 0, 0))


def varlen_prefix() -> str:
    """Compare it where segments continue a prefix: fewer queries than keys."""
    return _compare_varlen((7, 33, 20), (0, 40, 130))


def _compare_varlen(lengths: Sequence[int], prefixes: Sequence[int]) -> str:
    import torch

    from cb_rollout.compat import torch as torch_compat

    def ends(sizes: Sequence[int]) -> "Tensor":
        counted = torch.tensor([0, *sizes]).cumsum(0)
        return counted.to(DEVICE, torch.int32)

    totals = [new + old for new, old in zip(lengths, prefixes, strict=True)]

    def states(num_tokens: int, num_heads: int) -> "Tensor":
        made = torch.randn(num_tokens, num_heads, HEAD_SIZE, dtype=torch.bfloat16, device=DEVICE)
        return made.requires_grad_()

    inputs = (
        states(sum(lengths), HEADS),
        states(sum(totals), KEY_HEADS),
        states(sum(totals), KEY_HEADS),
    )
    ours = torch_compat.varlen_of_grouped_heads(
        *inputs,
        ends(lengths),
        ends(totals),
        max(lengths),
        max(totals),
        scale=HEAD_SIZE**-0.5,
        window_size=(-1, 0),
    )
    segments = []
    for query, key, value in zip(
        inputs[0].split(list(lengths)),
        inputs[1].split(totals),
        inputs[2].split(totals),
        strict=True,
    ):
        segments.append(_sdpa(query, key, value))
    expected = torch.cat(segments)
    gradient = torch.randn_like(expected)
    output_error = float((ours - expected).detach().float().abs().max())
    gradient_error = 0.0
    for found, wanted in zip(
        torch.autograd.grad(ours, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
        strict=True,
    ):
        difference = float((found.float() - wanted.float()).abs().max())
        gradient_error = max(gradient_error, difference)
    said = f"off sdpa by {output_error:.1g}, gradients by {gradient_error:.1g}"
    if not output_error <= OUTPUT_TOLERANCE or not gradient_error <= GRADIENT_TOLERANCE:
        raise AssertionError(said)
    return said


def _sdpa(query_LHD: "Tensor", key_LKD: "Tensor", value_LKD: "Tensor") -> "Tensor":
    """Attend with sdpa over one segment, whose queries are the last of its tokens."""
    import torch

    num_queries = len(query_LHD)
    num_keys = len(key_LKD)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=key_LKD.device)
    mask = mask.tril(num_keys - num_queries)
    repeats = HEADS // KEY_HEADS
    output_HLD = torch.nn.functional.scaled_dot_product_attention(
        query_LHD.transpose(0, 1),
        key_LKD.transpose(0, 1).repeat_interleave(repeats, 0),
        value_LKD.transpose(0, 1).repeat_interleave(repeats, 0),
        attn_mask=mask,
        scale=HEAD_SIZE**-0.5,
    )
    return output_HLD.transpose(0, 1)


CHECKS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "driver": driver,
    "triton_kernel": triton_kernel,
    "capture": capture,
    "inductor": inductor,
    "varlen": varlen,
    "varlen_prefix": varlen_prefix,
}


def line_of(process: subprocess.Popen[str], name: str, seconds: float) -> str:
    """Return the line of a check whose process has ended, and its traceback below if it failed."""
    printed = process.communicate()[0].rstrip()
    if process.returncode == 0:
        return f"{name}: ok in {seconds:.1f} s: {printed}"
    lines = printed.splitlines() or [f"ended with {process.returncode}"]
    return "\n".join([f"{name}: FAILED after {seconds:.1f} s: {lines[-1]}", *lines])


def run_all(names: Sequence[str], limit: float = SECONDS) -> bool:
    """Run each check in a process, print its line when it ends; return whether all passed."""
    begun = time.perf_counter()
    running: dict[str, subprocess.Popen[str]] = {}
    for name in names:
        command = [sys.executable, __file__, "--alone", name]
        running[name] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    passed = True
    while running:
        seconds = time.perf_counter() - begun
        for name, process in list(running.items()):
            if process.poll() is None and seconds < limit:
                continue
            if process.poll() is None:
                process.kill()
                process.communicate()
                print(f"{name}: FAILED: it did not end in {seconds:.1f} s", flush=True)
                passed = False
            else:
                print(line_of(process, name, seconds), flush=True)
                passed = passed and process.returncode == 0
            del running[name]
        time.sleep(0.05)
    return passed


def main() -> None:
    """Run the checks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--alone", choices=CHECKS, help="run one check in this process")
    options = parser.parse_args()
    # The folders of scripts/ import each other, and the package may not be installed.
    root = Path(__file__).parents[2]
    for folder in (root, root / "scripts"):
        sys.path.insert(0, str(folder))
    if options.alone:
        print(CHECKS[options.alone]())
        return
    chosen = options.checks or list(CHECKS)
    unknown = [name for name in chosen if name not in CHECKS]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}")
    if "driver" in chosen and shutil.which("nvidia-smi") is None:
        print("driver: there is no nvidia-smi", flush=True)
        chosen = [name for name in chosen if name != "driver"]
    raise SystemExit(not run_all(chosen))


if __name__ == "__main__":
    main()
