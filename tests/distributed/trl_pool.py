"""One process of a trainer whose completions a pool samples.

Called with a checkpoint, a way of `WAYS`, and a file. In the way "own" each process has a pool of
its own, in "fsdp2_engine" all share an engine, else a pool. Ray is the cluster that `RAY_ADDRESS`
names.
"""

import json
import os
import sys
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerated import allow_deepspeed, allow_fsdp
from peft import LoraConfig
from playback import TOOLS
from tiny import char_tokenizer, tiny_model
from tiny_trainer import logged, tiny_trainer
from transformers import AutoModelForCausalLM
from trl_sharded import CHATS, fsdp, with_tools_on_some, zero

from cb_rollout import RolloutConfig, RolloutError, attach
from cb_rollout.integrations.ray import RolloutPool
from cb_rollout.integrations.ray import pool as pool_module
from cb_rollout.weights import tensor

LORA_CONFIG = LoraConfig(r=4, target_modules=["q_proj"])
LORA = {"trainer_arguments": {"peft_config": LORA_CONFIG}}
WAYS: dict[str, dict[str, Any]] = {
    "own": {},
    "ddp": {},
    "fsdp2": fsdp(2),
    "fsdp2_lora": fsdp(2) | LORA,
    "fsdp2_adapters": fsdp(2) | LORA,
    "fsdp2_split": fsdp(2),
    "fsdp2_engine": fsdp(2),
    "fsdp2_tools": {**(fsdp(2) | TOOLS | CHATS), "prepare_tokenizer": with_tools_on_some},
    "fsdp1": fsdp(1),
    "zero3": zero(3),
}


class Alive:
    """Counts the bytes of values that are read for a sync and not freed yet."""

    def __init__(self) -> None:
        self.most = 0
        self._values: list[Any] = []
        self._new_values = pool_module.new_values

    def new_values(self, *arguments: Any, **options: Any) -> Any:
        """In the place of `weight_update.new_values`."""
        for expected, value in self._new_values(*arguments, **options):
            storage = value.untyped_storage()
            self._values = [v for v in self._values if v() is not None] + [weakref.ref(storage)]
            sizes = {id(s): s.nbytes() for s in (v() for v in self._values) if s is not None}
            self.most = max(self.most, sum(sizes.values()))
            del storage
            yield expected, value
            del value


def error_of(call: Any) -> str:
    """The name of what a call raises, and its text."""
    try:
        call()
    except RolloutError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(pool: RolloutPool) -> list[str]:
    """What a process is told where one of them does something wrong."""
    prompts = [[5, 6], [10**9 if os.environ["RANK"] == "1" else 7]]
    return [
        error_of(lambda: pool.generate_batch(prompts, max_new_tokens=2)),
        error_of(lambda: pool.sync_weights(tiny_model(hidden_size=32))),
    ]


def main() -> None:
    checkpoint, way, found = sys.argv[1:]
    allow = allow_deepspeed if "zero" in way else allow_fsdp
    allow()
    # DeepSpeed empties the models that are made after its trainer.
    sizes = [p.nbytes for p in tiny_model(vocab_size=len(char_tokenizer())).parameters()]
    settings = {"per_device_train_batch_size": 8, "max_steps": 2, **WAYS[way]}
    if way in ("fsdp2_split", "fsdp2_engine"):
        settings["model"] = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = tiny_trainer(Path(tempfile.mkdtemp()), **settings)
    alive = Alive()
    pool_module.new_values = alive.new_values
    tensor.BUCKET_BYTES = max(sizes)
    config = RolloutConfig(
        num_blocks=256, seed=3, verify_every_steps=1, max_logprob_drift=1e-4,
        tensor_parallel_size={"fsdp2_split": 2, "fsdp2_engine": 4}.get(way, 1),
    )  # fmt: skip
    with ExitStack() as stack:
        if way == "fsdp2_engine":
            generator = stack.enter_context(attach(trainer, config))
        else:
            pool = stack.enter_context(
                RolloutPool(
                    checkpoint, config, tokenizer=char_tokenizer(),
                    num_workers=1 if way == "own" else 2,
                    accelerator=None if way == "own" else trainer.accelerator,
                    peft_config=LORA_CONFIG if way == "fsdp2_adapters" else None,
                )
            )  # fmt: skip
            generator = attach(trainer, pool)
        trainer.train()
        outputs = generator.generate_batch(["1+2="], max_new_tokens=20)
        refused = [] if way in ("own", "fsdp2_engine") else refusals(pool)
        report = generator.sync_weights()
        num_alive = 0 if way == "fsdp2_engine" else pool.num_alive
        workers = [process.pid for process in pool._cluster._processes] if way == "own" else []
    (output,) = outputs.values()
    result = {
        "version": report.policy_version,
        "sent_bytes": report.bytes_copied,
        "num_alive": num_alive,
        "worker_pids": workers,
        "tokens": output.generated_tokens,
        "versions": output.policy_versions,
        "drifts": logged(trainer, "rollout/logprob_drift_max"),
        "rollout_tokens": logged(trainer, "rollout/tokens"),
        "lengths": logged(trainer, "completions/mean_length"),
        "losses": logged(trainer, "loss"),
        "refused": refused,
        "most_bytes": alive.most,
        "bucket_bytes": tensor.BUCKET_BYTES,
        "all_bytes": sum(sizes),
    }
    if way in ("own", "ddp"):
        result["weights"] = sum(float(p.double().sum()) for p in trainer.model.parameters())
    Path(found).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
