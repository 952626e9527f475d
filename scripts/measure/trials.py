"""Print how long it takes to try the C++ kernels of a model shape, and to read the verdicts later.

`python scripts/measure/trials.py [HEADS KEY_HEADS SIZE]`. Verdicts go to a temporary folder.
"""

import os
import sys
import tempfile
import time

import torch

from cb_rollout.engine.numerics import kernels
from cb_rollout.engine.numerics.qualification import qualifier


def main() -> None:
    """Load each kernel twice, as two processes would: with a trial, and with its verdict."""
    heads, key_heads, size = map(int, sys.argv[1:] or ("32", "8", "128"))
    shape = {
        "NUM_HEADS": heads,
        "NUM_KEY_HEADS": key_heads,
        "KEY_SIZE": size,
        "VALUE_SIZE": size,
    }
    print(f"heads {heads}, key heads {key_heads}, size {size}")
    print("kernel      dtype           compiled  tried  read again")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for dtype in kernels.DTYPES:
            for name, sizes in (("multiply", {}), ("attend", shape)):
                whole = _seconds_to_load(name, dtype, sizes)
                verdict = kernels.proof_of(name, dtype, **sizes)
                assert verdict is not None
                kernels.kernel.cache_clear()
                qualifier.forget_trials()
                again = _seconds_to_load(name, dtype, sizes)
                compiled = whole - verdict.seconds
                row = f"{name:<11} {str(dtype).removeprefix('torch.'):<15} {compiled:6.1f} s"
                print(f"{row} {verdict.seconds:4.1f} s {1000 * again:8.1f} ms")


def _seconds_to_load(name: str, dtype: torch.dtype, sizes: dict[str, int]) -> float:
    begun = time.perf_counter()
    kernels.kernel(name, dtype, **sizes)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
