"""Other engines whose rollouts `scripts/measure/audit.py` audits: transformers' manager, and vLLM.

Each is a context manager that yields a function: it samples a completion of each prompt, with the
settings that it is given, and returns the outputs that an audit takes. The model must not run
elsewhere meanwhile.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.peers.vllm_process import (
    MODEL,
    PYTHON_VARIABLE,
    VllmProcess,
    vllm_arguments,
    vllm_environment,
)
from cb_rollout import GenerationOutput
from cb_rollout.tools.bench import Workload, batching_fields

Prompts = Sequence[Sequence[int]]
Sample = Callable[..., list[GenerationOutput]]

# Enough for the few sequences of an audit.
NUM_PAGES = 256


@contextmanager
def transformers_manager(
    model: Any, prompts: Prompts, num_new: int, temperature: float = 1.0, **sampling: Any
) -> Iterator[Sample]:
    """Start transformers' manager, which keeps its prefixes, on a model or on a PEFT model."""
    attention = model.config._attn_implementation
    longest = [len(prompt) + num_new for prompt in prompts]
    fields: dict[str, Any] = {**batching_fields(longest, "cpu"), "num_blocks": NUM_PAGES}
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            do_sample=True, temperature=temperature, **{"top_k": 0, "top_p": 1.0} | sampling,
            max_new_tokens=num_new, eos_token_id=-1, pad_token_id=0,
        ),
        continuous_batching_config=ContinuousBatchingConfig(**fields, return_logprobs=True),
    )  # fmt: skip

    def sample(seed: int = 0) -> list[GenerationOutput]:
        torch.manual_seed(seed)
        names = [
            manager.add_request(list(prompt), max_new_tokens=num_new, eos_token_id=-1)
            for prompt in prompts
        ]
        done: dict[str, Any] = {}
        while len(done) < len(names):
            output = manager.get_result(timeout=100)
            assert output is not None, "no result within 100 seconds"
            assert output.error is None, output.error
            if output.is_finished():
                done[output.request_id] = output
        return [
            GenerationOutput(
                name, list(prompt), done[name].generated_tokens, done[name].logprobs,
                temperature=temperature,
            )
            for name, prompt in zip(names, prompts, strict=True)
        ]  # fmt: skip

    manager.start()
    try:
        yield sample
    finally:
        manager.stop(block=True)
        manager.destroy()
        model.set_attn_implementation(attention)


@contextmanager
def vllm(model: Any, prompts: Prompts, num_new: int, **arguments: Any) -> Iterator[Sample]:
    """Start vLLM of `CB_ROLLOUT_VLLM_PYTHON` on a copy of a plain model."""
    python = Path(os.environ[PYTHON_VARIABLE])
    workload = Workload([list(prompt) for prompt in prompts], [num_new] * len(prompts))
    arguments = vllm_arguments(model, [workload]) | {"enforce_eager": True} | arguments
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / MODEL)
        variables = vllm_environment(python, model.device.type)
        with VllmProcess(str(python), arguments, variables, Path(folder)) as process:

            def sample(temperature: float = 1.0, **sampling: Any) -> list[GenerationOutput]:
                settings = {"temperature": temperature, **sampling}
                request = {"prompts": workload.prompts, "lengths": workload.lengths}
                answer = process.ask({**request, "sampling": settings})
                columns = (workload.prompts, answer["tokens"], answer["logprobs"])
                return [
                    GenerationOutput(f"r{number}", *row, temperature=temperature)
                    for number, row in enumerate(zip(*columns, strict=True))
                ]

            yield sample
