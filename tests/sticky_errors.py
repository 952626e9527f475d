"""Errors after which CUDA refuses every call of the process: no later test of it can pass."""

import os

import pytest

STICKY = (
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "invalid program counter",
    "device-side assert",
    "hardware stack error",
    "uncorrectable ECC error",
)
# As CUDA words them.

EXIT_STATUS = 70


def is_sticky(error):
    """Whether an error, or one that it came from, ended the CUDA context."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and any(text in str(error) for text in STICKY):
            return True
        error = error.__cause__ or error.__context__
    return False


def end_process_after(error):
    """End a worker of xdist, which starts another in its place; end a run without workers."""
    if not is_sticky(error):
        return
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.exit(f"CUDA cannot be used in this process any more: {error}", EXIT_STATUS)
    # The test's failure is reported by now; pytest reports the worker's end as another.
    os._exit(EXIT_STATUS)
