"""One process of a trainer under DDP, with a pool of its own; called with a checkpoint and a file.

The processes' pools share the Ray cluster that `RAY_ADDRESS` names.
"""

import json
import sys
import tempfile
from pathlib import Path

from tiny import char_tokenizer
from tiny_trainer import logged, tiny_trainer

from cb_rollout import RolloutConfig, attach
from cb_rollout.integrations.ray import RolloutPool


def main() -> None:
    checkpoint, found = sys.argv[1:]
    trainer = tiny_trainer(Path(tempfile.mkdtemp()), per_device_train_batch_size=8, max_steps=2)
    config = RolloutConfig(num_blocks=256, seed=3, verify_every_steps=1, max_logprob_drift=1e-4)
    with RolloutPool(checkpoint, config, num_workers=1, tokenizer=char_tokenizer()) as pool:
        generator = attach(trainer, pool)
        trainer.train()
        outputs = generator.generate_batch(["1+2="], max_new_tokens=20)
        version = pool.policy_version
    (output,) = outputs.values()
    result = {
        "version": version,
        "tokens": output.generated_tokens,
        "versions": output.policy_versions,
        "drifts": logged(trainer, "rollout/logprob_drift_max"),
        "weights": sum(float(p.double().sum()) for p in trainer.model.parameters()),
    }
    Path(found).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
