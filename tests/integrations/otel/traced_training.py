"""Train one step with tools, and export it as the OTEL_* variables say."""

import sys
from pathlib import Path

import pytest
from datasets import Dataset
from playback import TOOLS, double, with_tools
from tiny_trainer import PROBLEMS, tiny_trainer

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations import otel


def rewards(completions, **_):
    return [float(len(str(completion)) % 3) for completion in completions]


rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PROBLEMS]
patch = pytest.MonkeyPatch()
settings = {"per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 1}
with otel.export():
    trainer = tiny_trainer(
        Path(sys.argv[1]),
        reward=rewards,
        prepare_tokenizer=lambda tokenizer: with_tools(patch, tokenizer),
        trainer_arguments={"tools": [double], "train_dataset": Dataset.from_list(rows)},
        **(settings | TOOLS),
    )
    attach(trainer, RolloutConfig(seed=0, verify_every_steps=1))
    trainer.train()
    detach(trainer)
