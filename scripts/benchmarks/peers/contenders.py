"""Contenders beside those of the wheel: over HTTP, of another model, and without a weight sync."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.harness.contenders import Contender, ours
from benchmarks.models import word_tokenizer
from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.tools.bench import SEED, Run, Workload

# Clients run in a process of their own; each line of the input is one batch of requests.
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


def ours_at_temperature(temperature: float, **settings: Any) -> Contender:
    """Create a contender of this package that only generates, at a temperature; 0 is greedy."""
    return ours(temperature=temperature, syncs_weights=False, **settings)


def of_another_model(contender: Contender, model: Any) -> Contender:
    """Create a contender that runs this model in place of the others'."""
    return contender._replace(create=lambda _, workload: contender.create(model, workload))


def served() -> Contender:
    """Create a contender of this package whose requests come over HTTP from another process."""

    @contextmanager
    def create(model: Any, workload: Workload) -> Iterator[Run]:
        del workload
        config, tokenizer = RolloutConfig(seed=SEED), word_tokenizer(model.config.vocab_size)
        with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
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
                requests.write(f"{json.dumps(_request_bodies(part))}\n")
                requests.flush()
                assert answers.readline() == "done\n", "the client failed"
                generator.sync_weights()

            try:
                yield run
            finally:
                requests.close()
                client.wait()
                answers.close()

    return Contender(
        create, "all requests at once, a connection each, with token ids and log-probabilities"
    )


def _request_bodies(workload: Workload) -> list[dict[str, Any]]:
    return [
        {
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "logprobs": 0,
            "return_token_ids": True,
        }
        for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
    ]  # fmt: skip
