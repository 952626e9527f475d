#!/usr/bin/env python
"""Do a pool harm at random, and hold every sequence and weight against plain forwards.

python scripts/chaos/pool.py --minutes 60    # prints one line a minute, and the counts at its end

Worker processes are killed, stopped for a moment, and stopped for so long that the pool takes them
for dead, in rollouts and in weight syncs; nodes of the Ray cluster come and go; the pool grows and
shrinks; a trainer ends in the middle, and another one goes on with the next version. About every
second trainer has split workers, whose leaders and followers are harmed alike. No sequence may be
missing, doubled, or of mixed weights, and no process may be left. Needs
`pip install 'cb_rollout[ray]'` and the packages of the tests.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from tiny import plain_logprobs, tiny_model

from cb_rollout import EngineDeadError, RolloutConfig, WeightSyncError
from cb_rollout.integrations.ray import RolloutPool

CONFIG = RolloutConfig(num_blocks=256, max_requests_per_batch=16, seed=11)
NUM_WORKERS, NUM_PROMPTS, MAX_ERROR = 3, 48, 1e-5

# Longest answer of a worker: one that is stopped for longer is replaced.
TIMEOUT_SECONDS = 15.0

# Seconds between two faults, at most.
MAX_PEACE = 4.0

_DRAWING = threading.Lock()


def weights_of(version: int) -> torch.nn.Module:
    """Return a model with weights of its own for every version; of version 0 the checkpoint's."""
    # A new model draws from torch's one generator, and both threads make some.
    with _DRAWING:
        model = tiny_model()
    generator = torch.Generator().manual_seed(version)
    if version:
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.dim() > 1):
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * parameter.std() * noise)
    return model


class Chaos:
    """A thread that does harm until it is told to stop."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.pool: RolloutPool | None = None
        self.processes: set[int] = set()
        self._cluster, self._random, self._ended = cluster, random.Random(seed), threading.Event()
        self._nodes: list[object] = []
        self._thread = threading.Thread(target=self._run, name="chaos")
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._random.uniform(0.2, MAX_PEACE)):
            harm = self._random.choice([self.kill, self.pause, self.pause, self.hang, self.resize])
            # The pool or a process may end meanwhile.
            with suppress(ProcessLookupError, AttributeError, TypeError, EngineDeadError):
                harm()

    def worker(self) -> int:
        """Return a process of a worker that runs: its only one, its leader, or a follower."""
        running = [p.pid for p in self.pool.manager._cluster._processes if p.is_running()]
        self.processes |= set(running)
        return self._random.choice(running or [None])

    def kill(self) -> None:
        os.kill(self.worker(), signal.SIGKILL)
        self.counts["killed"] += 1

    def pause(self) -> None:
        self._stop_for(self._random.uniform(0.1, TIMEOUT_SECONDS / 3), "paused")

    def hang(self) -> None:
        self._stop_for(1.5 * TIMEOUT_SECONDS, "cut off")

    def _stop_for(self, seconds: float, name: str) -> None:
        process = self.worker()
        os.kill(process, signal.SIGSTOP)
        self.counts[name] += 1
        self._ended.wait(seconds)
        os.kill(process, signal.SIGCONT)

    def resize(self) -> None:
        self.pool.resize(self._random.randint(1, NUM_WORKERS + 1))
        self.counts["resized"] += 1

    def change_nodes(self) -> None:
        """Add a node to the cluster, or take one away; Ray allows it to the main thread only."""
        if self._nodes and self._random.random() < 0.5:
            node = self._nodes.pop(self._random.randrange(len(self._nodes)))
            self._cluster.remove_node(node, allow_graceful=self._random.random() < 0.5)
            self.counts["nodes removed"] += 1
        elif len(self._nodes) < 2:
            self._nodes.append(self._cluster.add_node(num_cpus=2))
            self.counts["nodes added"] += 1


class Ledger:
    """What was sampled, against what plain forwards of each version give."""

    def __init__(self) -> None:
        self.num_sequences, self.num_mixed, self.num_refused = 0, 0, 0
        self.largest_error = 0.0
        self.versions: Counter[int] = Counter()
        # A sequence may have begun some versions ago.
        self._models: dict[int, torch.nn.Module] = {}
        self._recent: deque[int] = deque(maxlen=32)

    def check(self, base: int, prompts: list[list[int]], lengths: list[int], outputs: list) -> None:
        """Require one exact sequence for each prompt; a pool's version 0 is `base`."""
        assert [list(o.prompt_ids) for o in outputs] == prompts, "sequences are missing or doubled"
        for output, length in zip(outputs, lengths, strict=True):
            assert 1 <= len(output.generated_tokens) <= length
            self.num_sequences += 1
            self.num_mixed += len(output.policy_versions) > 1
            start = 0
            for of_pool, count in output.policy_versions:
                version = base + of_pool
                expected = plain_logprobs(
                    self._model(version), output.prompt_ids, output.generated_tokens
                )[start : start + count]
                found = output.logprobs[start : start + count]
                errors = (abs(a - b) for a, b in zip(found, expected, strict=True))
                self.largest_error = max(self.largest_error, *errors)
                self.versions[version] += count
                start += count
            assert start == len(output.generated_tokens)
        assert self.largest_error < MAX_ERROR, f"weights are mixed: {self.largest_error:.2g} nats"

    def _model(self, version: int) -> torch.nn.Module:
        if version not in self._models:
            self._models[version] = weights_of(version)
            self._recent.append(version)
            self._models = {v: self._models[v] for v in self._recent}
        return self._models[version]


def train(chaos: Chaos, first: int, ledger: Ledger, end: float, chance: random.Random) -> int:
    """Sync until `end`, beside a thread that rolls out; return the last version."""
    pool = chaos.pool
    failures: list[BaseException] = []
    is_over = threading.Event()

    def sample(seed: int) -> None:
        own = random.Random(seed)
        try:
            while not is_over.is_set():
                prompts = [
                    [5 + own.randrange(7), 6, own.randrange(251)] for _ in range(NUM_PROMPTS)
                ]
                lengths = [own.randint(1, 24) for _ in prompts]
                outputs = list(pool.generate_batch(prompts, max_new_tokens=lengths).values())
                ledger.check(first, prompts, lengths, outputs)
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            failures.append(error)

    thread = threading.Thread(target=sample, args=(first,))
    thread.start()
    version = first
    while time.monotonic() < end and not failures and chaos.is_alive():
        time.sleep(chance.uniform(0.1, 3.0))
        if chance.random() < 0.1:
            chaos.change_nodes()
        try:
            pool.sync_weights(weights_of(version + 1).state_dict())
            version += 1
        except WeightSyncError:
            # No worker took them: the pool keeps its version, and the trainer tries again.
            ledger.num_refused += 1
    is_over.set()
    thread.join()
    if failures:
        raise failures[0]
    assert chaos.is_alive(), "nobody does any harm"
    return version


def main() -> int:
    """Run the chaos; 1: a process is left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6})
    ray.init(address=cluster.address, log_to_driver=False)
    chaos, ledger, chance = Chaos(cluster, args.seed), Ledger(), random.Random(args.seed)
    end, version, sizes = time.monotonic() + 60 * args.minutes, 0, Counter[int]()
    try:
        with tempfile.TemporaryDirectory() as checkpoint:
            while time.monotonic() < end:
                weights_of(version).save_pretrained(checkpoint)
                config = replace(CONFIG, tensor_parallel_size=chance.choice([1, 2]))
                with RolloutPool(
                    checkpoint, config, num_workers=NUM_WORKERS, timeout_seconds=TIMEOUT_SECONDS
                ) as pool:
                    chaos.pool = pool
                    sizes[config.tensor_parallel_size] += 1
                    part = min(end, time.monotonic() + chance.uniform(60, 240))
                    version = train(chaos, version, ledger, part, chance)
                print(
                    f"{sizes.total()} trainers ({sizes[2]} of split workers), {version} versions, "
                    f"{ledger.num_sequences} "
                    f"sequences, {ledger.num_mixed} of several versions, {ledger.num_refused} "
                    f"syncs that no worker took, error {ledger.largest_error:.1e}, "
                    f"{dict(chaos.counts)}",
                    flush=True,
                )
    finally:
        chaos.stop()
        ray.shutdown()
        cluster.shutdown()
    left = [process for process in chaos.processes if psutil.pid_exists(process)]
    print(f"processes left: {len(left)}")
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
