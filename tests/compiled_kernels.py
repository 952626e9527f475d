"""Compiles the Triton kernels for a GPU that need not be there; prints what came out as JSON.

python tests/compiled_kernels.py 90    # for compute capability 9.0
python tests/compiled_kernels.py 90 5    # with five stages in every loop over keys
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cb_rollout.engine.attention.decode_cache import AttentionSpec, DecodeLayer
from cb_rollout.engine.attention.shared_prefix import AttentionMetadata
from cb_rollout.engine.attention.triton import launch
from cb_rollout.engine.attention.triton.launch import (
    StateTable,
    attend,
    cut,
    grouped_product,
    move_states,
    shared_rows,
    write,
)
from cb_rollout.engine.cuda_graphs.graph_sampler import GraphSampler, GraphSampling
from cb_rollout.engine.cuda_graphs.inputs import GraphInputs
from cb_rollout.engine.kv_cache.layout import LayerSpec, TensorSpec

BF16, FP32 = torch.bfloat16, torch.float32
FEW_ROWS, MANY_ROWS, STRETCHES = 4, 32, 66
FORMS = {
    # Query heads, key heads, size of a key and of a value, dtype; window, cap, sinks.
    "Qwen3-8B": ((32, 8, 128, 128, BF16), (None, None, False)),
    "Gemma-3": ((8, 1, 256, 256, BF16), (512, 50.0, False)),
    "gpt-oss": ((64, 8, 64, 64, BF16), (128, None, True)),
    "odd sizes": ((4, 4, 80, 48, torch.float16), (None, None, False)),
    "float32": ((16, 8, 128, 128, FP32), (None, None, False)),
}


# Rows, experts, size of a row and of a result, dtype.
PRODUCTS = {
    "few rows": (32, 8, 2048, 768, BF16),
    "many rows": (1024, 8, 2048, 768, BF16),
    "few rows in float32": (32, 8, 2048, 768, FP32),
    "many rows in float32": (1024, 8, 2048, 768, FP32),
}


def multiply(num_rows, num_groups, size, num_columns, dtype):
    """A product of experts, whose weights transformers stores by column."""
    weights = torch.empty(num_groups, num_columns, size, dtype=dtype).transpose(1, 2)
    ends = torch.ones(num_groups, dtype=torch.int32)
    grouped_product(torch.empty(num_rows, size, dtype=dtype), weights, ends)


def decode(sizes, asked, is_shared, num_rows):
    """What one layer launches in a decode step."""
    heads, key_heads, key_size, value_size, dtype = sizes
    window, softcap, has_sinks = asked
    ints = torch.ones(num_rows, dtype=torch.int32)
    states = (TensorSpec((key_heads, size), dtype) for size in (key_size, value_size))
    layer = DecodeLayer(0, LayerSpec(*states), torch.device("cpu"))
    tiles = {}
    if is_shared:
        rows_per_tile = shared_rows(heads // key_heads, layer)
        tiles = {"shared_B": ints, "first_T": ints[:2], "count_T": ints[:2]}
        tiles["rows_per_tile"] = rows_per_tile
    metadata = AttentionMetadata(
        torch.zeros(6, dtype=torch.int64), 16, ints, ints, STRETCHES, **tiles
    )
    sinks = torch.zeros(heads, dtype=dtype) if has_sinks else None
    queries, keys, values = (
        torch.zeros(num_rows, *shape, dtype=dtype)
        for shape in ((heads, key_size), (key_heads, key_size), (key_heads, value_size))
    )
    write(keys, values, layer, metadata)
    spec = AttentionSpec(key_size**-0.5, window, softcap, sinks)
    attend(queries, layer, metadata, spec, cut(metadata, window))
    # One program attends over all keys of a row.
    attend(queries, layer, replace(metadata, shared_B=None), spec, None)


# A state of a sequence.
STATES = {
    "recurrent state": StateTable((32, 128, 128), FP32, 2),
    "convolution state": StateTable((1000, 3), BF16, 2),
}


def move(table):
    """What a decode step launches for one state."""
    ints = torch.ones(MANY_ROWS, dtype=torch.int32)
    metadata = AttentionMetadata(torch.zeros(3, dtype=torch.int64), 16, ints, ints)
    move_states(table, metadata, move_states(table, metadata))


# Rows, vocabulary, dtype of the logits, and tokens that are never sampled.
SAMPLERS = {
    "Qwen3-8B": (FEW_ROWS, 151936, BF16, (151655, 151656)),
    "odd vocabulary": (FEW_ROWS, 50257, FP32, ()),
    "small vocabulary": (FEW_ROWS, 1000, torch.float16, ()),
}


def sample(num_rows, vocab_size, dtype, never_sampled):
    """What a captured step launches to sample."""
    inputs, device = GraphInputs(num_rows, torch.device("cpu")), torch.device("cpu")
    sampler = GraphSampler(num_rows, device, GraphSampling(never_sampled))
    sampler.sample(torch.zeros(num_rows, vocab_size, dtype=dtype), inputs.tensor)


def resources(cubin):
    """Registers and bytes of stack of a thread, as the assembler left them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups()
    return {"registers": int(registers), "stack": int(stack)}


def main(capability):
    made = []

    def compiled(kernel, grid):
        def launch(*args, **kwargs):
            binary = kernel.warmup(*args, grid=grid, **kwargs)
            named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            made.append(
                {
                    "kernel": kernel.__name__,
                    "rows": named[kernel.arg_names[0]].shape[0],
                    "stages": kwargs.get("num_stages"),
                    "splits own keys": named.get("items") is not None and not named["IS_SHARED"],
                    "bytes": len(binary.asm["cubin"]),
                    "shared": binary.metadata.shared,
                    "wide copies": binary.asm["ptx"].count("cp.async.cg"),
                    "products": binary.asm["ptx"].count("mma."),
                }
                | resources(binary.asm["cubin"])
            )

        return launch

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device=None: 0,
        )
    )
    JITFunction.__getitem__ = compiled
    for form, (sizes, asked) in FORMS.items():
        num_before = len(made)
        for num_rows in (FEW_ROWS, MANY_ROWS):
            for is_shared in (False, True):
                decode(sizes, asked, is_shared, num_rows)
        made[num_before:] = [one | {"form": form} for one in made[num_before:]]
    for form, sizes in PRODUCTS.items():
        multiply(*sizes)
        made[-1]["form"] = form
    for form, table in STATES.items():
        move(table)
        made[-2:] = [one | {"form": form} for one in made[-2:]]
    for form, sizes in SAMPLERS.items():
        num_before = len(made)
        sample(*sizes)
        made[num_before:] = [one | {"form": form} for one in made[num_before:]]
    sys.stdout.write(json.dumps(made))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        launch.num_stages = lambda *_, **__: int(sys.argv[2])
    main(int(sys.argv[1]))
