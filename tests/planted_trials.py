"""Trials that go wrong in every way, for a child process to run. Imports nothing slow."""

import ctypes
import os
from pathlib import Path


def wrong(argument):
    return {"fault": "it computes numbers that are off by 2", "milliseconds": {}}


def raises(argument):
    raise ArithmeticError("nothing\nis right")


def hangs(argument):
    while True:
        pass


def hangs_in_c(argument):
    ctypes.CDLL(None).pause()


def segfaults(argument):
    ctypes.string_at(0)


def aborts(argument):
    os.abort()


def exits(argument):
    os._exit(0)


def prints_and_segfaults(argument):
    print('["returned", {"fault": "", "milliseconds": {}}]', flush=True)  # noqa: T201
    ctypes.string_at(0)


def prints(argument):
    print("to standard output", flush=True)  # noqa: T201
    return "answered"


def counts(argument):
    with Path(argument["file"]).open("a") as file:
        file.write("x")
    return {"fault": "", "milliseconds": {"fast": 1.5, "slow": 3.0}}


def counts_and_hangs(argument):
    counts(argument)
    hangs(argument)


def runs_out_of_memory(argument):
    counts(argument)
    raise MemoryError


def segfaults_under_graphs(argument):
    if argument["settings"]["use_cuda_graph"] is None:
        segfaults(argument)
    return {"fault": "", "milliseconds": {}}


def segfaults_compiled(argument):
    if argument["settings"]["use_default_compile_configs"] is None:
        segfaults(argument)
    return {"fault": "", "milliseconds": {}}


def proved(argument):
    return {"fault": "", "milliseconds": {}}


def cannot_have_the_card(argument):
    from cb_rollout.engine.numerics.qualification.child import CannotTryError

    raise CannotTryError("cuda:0 cannot be had by two processes (busy)")
