"""An environment of verifiers, rolled out against the policy while it trains by GRPO.

verifiers pins other versions than cb_rollout needs, so this file runs in two Pythons. The trainer
serves its policy and starts the second one, which plays: a task is two digits, the answer is the
larger one, and a reward function checks it. verifiers' own training client sends token ids to the
endpoint and gets token ids and log-probabilities back. Its traces return as JSON, groups of them
become advantages, and the same weights that are served take a step.

Install:  python -m venv verifiers-env; verifiers-env/bin/pip install verifiers
Launch:   python recipes/verifiers_grpo.py --verifiers-python verifiers-env/bin/python
Hardware: two CPU cores, 2 GiB of memory, no network, no account
Minutes:  about two
Prints last:

    reward, first and last five steps     0.46 -> 0.83
    largest |log-probability difference|  3.7e-06
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from statistics import fmean

PAD, EOS, USER = 0, 1, 2
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *"0123456789"]
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WARM_STEPS = 60
PLAYS = len(sys.argv) > 1 and sys.argv[1] == "--play"

if PLAYS:
    import verifiers.v1 as vf
    from openai import AsyncOpenAI

    class Digits(vf.TaskData):
        """Two digits and the larger one."""

        answer: str

    class LargerDigit(vf.Task[Digits]):
        """Answer with the larger one of two digits."""

        @vf.reward
        async def is_larger(self, task: Digits, trace: vf.Trace) -> float:
            """Return 1 for the larger digit and nothing else."""
            return float(trace.last_reply == task.answer)

    class OneRequest(vf.Harness[vf.HarnessConfig]):
        """Ask the policy once; verifiers' own harnesses run programs, which `uv` installs."""

        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
        ) -> vf.ProgramResult:
            """Send the task's prompt through verifiers, which records the answer in the trace."""
            async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
                messages = [{"role": "user", "content": data.prompt}]
                await client.chat.completions.create(model=ctx.model, messages=messages)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def play(base_url: str, tokenizer: str) -> None:
        """Play the pairs of digits of each line of stdin, and print the traces as JSON."""
        config = vf.AgentConfig(
            model="policy",
            client=vf.TrainClientConfig(base_url=base_url, renderer_model_name=tokenizer),
            sampling=vf.SamplingConfig(temperature=1.0, max_tokens=2),
            harness=vf.HarnessConfig(id="null"),
            runtime=vf.SubprocessConfig(),
        )
        agent = vf.make_agent(config)
        agent.harness = OneRequest(config.harness)
        async with agent:
            for line in sys.stdin:
                tasks = [
                    LargerDigit(Digits(prompt=pair, answer=max(pair))) for pair in json.loads(line)
                ]
                traces = await asyncio.gather(*(agent.run(task) for task in tasks))
                print(json.dumps([described(trace) for trace in traces]), flush=True)

    def described(trace: vf.Trace) -> dict:
        """Return what a training step needs of a trace."""
        if trace.errors:
            raise RuntimeError(f"a rollout failed: {trace.errors[-1].message}")
        (branch,) = trace.branches
        return {
            "token_ids": branch.token_ids,
            "is_sampled": branch.sampled_mask,
            "logprobs": branch.logprobs,
            "reward": trace.reward,
        }

else:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from torch.nn.functional import cross_entropy
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from cb_rollout import RolloutConfig, RolloutGenerator


def create_tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=TEMPLATE,
    )


def create_model():
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def learn_the_format(model, tokenizer, optimizer, rng: random.Random) -> None:
    """Train on answers that are either of the two digits."""
    for _ in range(WARM_STEPS):
        chats = []
        for _ in range(64):
            pair = draw_pair(rng)
            said = {"role": "assistant", "content": rng.choice(pair)}
            chats.append([{"role": "user", "content": pair}, said])
        ids = torch.tensor(tokenizer.apply_chat_template(chats, return_dict=True)["input_ids"])
        logits = model(input_ids=ids).logits
        # A chat is <user>, two digits, <assistant>, the answer and <eos>.
        cross_entropy(logits[:, 3:-1].flatten(0, 1), ids[:, 4:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def draw_pair(rng: random.Random) -> str:
    return "".join(rng.sample("0123456789", 2))


def train_on(model, traces: list[dict], advantages: list[float]) -> float:
    """Backpropagate a policy-gradient loss; return the largest log-probability difference."""
    width = max(len(trace["token_ids"]) for trace in traces)

    def padded(name, value):
        rows = [trace[name] for trace in traces]
        return torch.tensor([row + [value] * (width - len(row)) for row in rows])

    ids = padded("token_ids", PAD)
    chosen, sampled = padded("is_sampled", False)[:, 1:], padded("logprobs", 0.0)[:, 1:]
    logits = model(input_ids=ids).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    weights = torch.tensor(advantages)[:, None] * chosen
    (-(weights * logprobs).sum() / chosen.sum()).backward()
    return (logprobs - sampled)[chosen].abs().max().item()


def played(player: subprocess.Popen, asked: list[str]) -> list[dict]:
    """Return a trace of each task, from the process with verifiers."""
    print(json.dumps(asked), file=player.stdin, flush=True)
    if not (line := player.stdout.readline()):
        raise RuntimeError(f"the process with verifiers ended with code {player.wait()}")
    return json.loads(line)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    rng, (tokenizer, model) = random.Random(0), (create_tokenizer(), create_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    learn_the_format(model, tokenizer, optimizer, rng)
    rewards, largest_difference = [], 0.0
    with (
        RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=tokenizer) as generator,
        tempfile.TemporaryDirectory() as saved,
    ):
        tokenizer.save_pretrained(saved)
        server = generator.serve(port=0)
        command = [args.verifiers_python, __file__, "--play", server.base_url, saved]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as player:
            for step in range(args.max_steps):
                pairs = [draw_pair(rng) for _ in range(args.tasks)]
                asked = [pair for pair in pairs for _ in range(args.rollouts)]
                traces, advantages = played(player, asked), []
                for first in range(0, len(traces), args.rollouts):
                    group = [trace["reward"] for trace in traces[first : first + args.rollouts]]
                    advantages += [reward - fmean(group) for reward in group]
                rewards.append(fmean(trace["reward"] for trace in traces))
                difference = train_on(model, traces, advantages)
                largest_difference = max(largest_difference, difference)
                # The weights may change inside `pause`; later tokens carry a new policy version.
                with generator.manager.pause():
                    optimizer.step()
                    optimizer.zero_grad()
                version = generator.policy_version
                print(f"step {step:3}  reward {rewards[-1]:.2f}  version {version}", flush=True)
            player.stdin.close()
    first, last = fmean(rewards[:5]), fmean(rewards[-5:])
    print(f"\nreward, first and last five steps     {first:.2f} -> {last:.2f}")
    print(f"largest |log-probability difference|  {largest_difference:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--verifiers-python", required=True, help="a Python that has verifiers")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--tasks", type=int, default=8, help="of a step")
    parser.add_argument("--rollouts", type=int, default=8, help="of each task")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    train(parser.parse_args())
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(asyncio.run(play(*sys.argv[2:])) if PLAYS else main())
