"""Run a recipe as one gloo process of several, as `accelerate launch` does on accelerators.

Arguments: a config file of accelerate, the recipe, its arguments, and (from `run_processes`) a file
to write at the end, with the sizes of accelerate's mesh. accelerate itself allows FSDP and
DeepSpeed on accelerators only; see `accelerated`.
"""

import json
import os
import runpy
import sys
from pathlib import Path

import trl
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from accelerated import allow_deepspeed, allow_fsdp


def main() -> None:
    """Set the environment that the config file asks for, then run the recipe."""
    config_file, recipe, *arguments, path = sys.argv[1:]
    asked = ["--config_file", config_file, "--mixed_precision", "no", recipe]
    launch, *_ = _validate_launch_command(launch_command_parser().parse_args(asked))
    launch.num_cpu_threads_per_process = 1
    if launch.use_deepspeed:
        os.environ["DS_ACCELERATOR"] = "cpu"
        launch.deepspeed_fields_from_accelerate_config = "zero_stage"
        _, environment = prepare_deepspeed_cmd_env(launch)
        make_config = trl.GRPOConfig
        trl.GRPOConfig = lambda **settings: make_config(**{**settings, "use_cpu": False})
        allow_deepspeed()
    else:
        environment = prepare_multi_gpu_env(launch)
        allow_fsdp()
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= {name: value for name, value in environment.items() if name not in ours}
    sys.argv = [recipe, *arguments]
    exit_code = runpy.run_path(recipe)["main"]()
    assert exit_code == 0, exit_code
    # Sizes by name, where the config file asks for several dimensions.
    mesh = AcceleratorState._shared_state.get("device_mesh")
    sizes = None if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    Path(path).write_text(json.dumps({"mesh": sizes}))


if __name__ == "__main__":
    main()
