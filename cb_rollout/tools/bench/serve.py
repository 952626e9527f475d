"""The same requests as one rollout, each by itself over HTTP, from another process."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cb_rollout
from cb_rollout.tools.bench.contenders import Contender, Run, ours
from cb_rollout.tools.bench.model import create_model, word_tokenizer
from cb_rollout.tools.bench.sizes import SEED, Setup
from cb_rollout.tools.bench.turns import interleaved, throughput
from cb_rollout.tools.bench.workload import Workload, long_tailed

CLIENT = """
import asyncio, json, sys
import httpx

async def main():
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=sys.argv[1], timeout=600, limits=limits) as client:
        async def ask(body):
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            (choice,) = answer["choices"]
            assert len(choice["token_ids"]) == body["max_tokens"]
            assert len(choice["logprobs"]["token_logprobs"]) == body["max_tokens"]
        for line in sys.stdin:
            await asyncio.gather(*map(ask, json.loads(line)))
            print("done", flush=True)

asyncio.run(main())
"""
# A process of its own, as clients are; each line of its input is one batch of requests.


def bench(setup: Setup) -> dict[str, Any]:
    """Useful tokens per second, called and served."""
    model = create_model(setup.sizes.shape, setup.device)
    workload = long_tailed(setup.sizes)
    contenders = {
        "cb_rollout": ours(),
        "served on loopback": Contender(
            served, "all requests at once, a connection each, with token ids and log-probabilities"
        ),
    }
    turns = interleaved(contenders, model, workload, setup.repetitions)
    return {
        "served": {
            name: throughput(contender, turns[name], workload.num_tokens)
            for name, contender in contenders.items()
        }
    }


@contextmanager
def served(model: Any, workload: Workload) -> Iterator[Run]:
    """A server in this process, and a client in another."""
    del workload
    config = cb_rollout.RolloutConfig(seed=SEED)
    tokenizer = word_tokenizer(model.config.vocab_size)
    with cb_rollout.RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, generator.serve(port=0).url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        requests, answers = client.stdin, client.stdout
        assert requests is not None
        assert answers is not None

        def run(part: Workload) -> None:
            requests.write(f"{json.dumps(_bodies(part))}\n")
            requests.flush()
            assert answers.readline() == "done\n", "the client failed"
            generator.sync_weights()

        try:
            yield run
        finally:
            requests.close()
            client.wait()
            answers.close()


def _bodies(workload: Workload) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True,
        }
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
    ]  # fmt: skip
