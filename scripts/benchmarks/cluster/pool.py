"""The workload `pool`: a rollout on a pool of workers, beside the same rollout on an engine.

The workers of a pool share the cores that the engine has. Weights travel too, which is timed alone.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.harness.contenders import Contender
from benchmarks.harness.timing import throughputs
from benchmarks.harness.workload import long_tailed
from benchmarks.peers.contenders import ours_at_temperature
from benchmarks.sizes import Setup
from cb_rollout import RolloutConfig, SamplingParams
from cb_rollout.errors import ConfigurationError
from cb_rollout.integrations.ray import RolloutPool
from cb_rollout.tools.bench import SEED, Run, Workload, create_model, timed

PARAMS = SamplingParams(ignore_eos=True)

POOLS = {"a pool of one": 1, "a pool of two": 2}

# Each worker traces in its first rollouts.
NUM_WARM_UPS = 3


def bench_pool(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of each, and milliseconds of a sync."""
    model, workload = create_model(setup.sizes.shape, setup.device), long_tailed(setup.sizes)
    print(f"pool: {len(workload.prompts)} sequences, {workload.num_tokens} tokens")
    syncs: dict[str, list[float]] = {name: [] for name in POOLS}
    contenders = {"cb_rollout": ours_at_temperature(1.0)}
    contenders |= {name: _pooled(count, syncs[name]) for name, count in POOLS.items()}
    with ray_cluster(setup):
        results = throughputs(contenders, model, workload, setup.repetitions, NUM_WARM_UPS)
    return {
        "pool": results,
        "pool_sync": {
            f"{name}, milliseconds": 1000 * statistics.median(seconds)
            for name, seconds in syncs.items()
        },
    }


@contextmanager
def ray_cluster(setup: Setup) -> Iterator[None]:
    """Start Ray on this machine, with the cores that torch uses here.

    Raises:
        ConfigurationError: the workload runs on a CPU only.
    """
    if setup.device != "cpu":
        raise ConfigurationError("workers share the cores of a CPU here; pass --device cpu.")
    import ray

    ray.init(
        address="local",
        num_cpus=torch.get_num_threads(),
        include_dashboard=False,
        log_to_driver=False,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def opened(model: Any, num_workers: int) -> Iterator[RolloutPool]:
    """Open a pool of a model's weights whose workers share this machine's cores."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with RolloutPool(
            folder,
            RolloutConfig(seed=SEED),
            num_workers=num_workers,
            resources_per_worker={"CPU": torch.get_num_threads() / num_workers},
        ) as pool:
            while pool.num_alive < num_workers:
                time.sleep(0.05)
            yield pool


def _pooled(num_workers: int, sync_seconds: list[float]) -> Contender:
    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        del workload
        with opened(model, num_workers) as pool:

            def run(part: Workload) -> None:
                pool.generate_batch(
                    part.prompts, sampling_params=PARAMS, max_new_tokens=part.lengths
                )

            yield run
            sync_seconds.append(timed(lambda: pool.sync_weights(model)))

    return Contender(create, f"{num_workers} workers, the cores divided among them")
