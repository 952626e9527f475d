"""The CPU demo's task with TRL's stock GRPOTrainer, and its rollouts on two workers of Ray.

`attach(trainer, pool)` is the one line that differs from arithmetic_cpu.py: before each rollout the
trainer's weights go to the workers, and the completions come from them. On a laptop Ray starts the
workers beside the script. On a cluster, run the script on one of its machines, and save the
checkpoint where every machine can read it. deploy/ has files for docker compose and Kubernetes.

Launch:   python recipes/pool_ray.py
Hardware: two CPU cores, 4 GiB of memory, no network; pip install 'cb_rollout[ray]'
Minutes:  about three
Prints last: held-out accuracy before and after training.
"""

import argparse
import random
from pathlib import Path

import torch
from arithmetic_cpu import (
    WARMUP_STEPS,
    create_model,
    create_tokenizer,
    create_trainer,
    draw_problems,
    warm_start,
)

from cb_rollout import RolloutConfig, attach, detach
from cb_rollout.integrations.ray import RolloutPool


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/pool"))
    parser.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=40, help="GRPO steps")
    parser.add_argument("--num-held-out", type=int, default=500, help="problems to measure with")
    parser.add_argument("--num-workers", type=int, default=2, help="workers of the pool")
    return parser.parse_args()


def main() -> None:
    args = parsed_arguments()
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    train = draw_problems(rng, 16 * args.max_steps, held_out=False)
    held_out = draw_problems(rng, args.num_held_out, held_out=True)
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, tokenizer, args.warmup_steps, rng)
    checkpoint = str(args.output_dir / "start")
    model.save_pretrained(checkpoint)

    trainer = create_trainer(model, tokenizer, train, held_out, args)
    config = RolloutConfig(seed=args.seed)
    with RolloutPool(checkpoint, config, num_workers=args.num_workers) as pool:
        attach(trainer, pool)
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        after = trainer.evaluate()["eval_reward"]
        detach(trainer)
    print(f"held-out accuracy {before:.1%} -> {after:.1%}")


if __name__ == "__main__":
    main()
