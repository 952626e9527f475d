"""A tiny model behind a real server on this machine, and OpenAI's own client for it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import openai
import torch
from tiny import byte_tokenizer, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.server import ServerHandle

# A request that takes longer fails its test.
TIMEOUT_SECONDS = 60.0

IDS = {"return_token_ids": True}


@contextmanager
def served(
    config: RolloutConfig | None = None, model: Any = None, tokenizer: Any = None, **options: Any
) -> Iterator[tuple[RolloutGenerator, ServerHandle]]:
    """Serve a tiny model; close its clients at the end."""
    tokenizer = tokenizer or byte_tokenizer()
    model = model or tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096)
    config = config or RolloutConfig(seed=0, block_size=16)
    with RolloutGenerator(model, config, tokenizer=tokenizer) as generator:
        yield generator, generator.serve(port=0, **options)
    while _clients:
        _clients.pop().close()


_clients: list[openai.OpenAI] = []


def client(server: ServerHandle, **settings: Any) -> openai.OpenAI:
    """Create a client that does not retry; it is closed with the server."""
    settings = {"api_key": "none", "timeout": TIMEOUT_SECONDS, "max_retries": 0, **settings}
    _clients.append(openai.OpenAI(base_url=server.base_url, **settings))
    return _clients[-1]


def idle(generator: RolloutGenerator) -> bool:
    """Wait for the engine to have no request; return False after a time-out."""
    loop = generator.manager.loop
    with loop._changed:
        return loop._changed.wait_for(lambda: not loop._live, timeout=TIMEOUT_SECONDS)


class Script:
    """A logits processor that forces one text after `<|start|>assistant`, then the end token."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        self._opening = tokenizer("<|start|>assistant\n")["input_ids"]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_said = self._num_said(input_ids[0].tolist())
        forced = torch.full_like(scores, -torch.inf)
        forced[0, self._tokens[num_said]] = 0.0
        return forced

    def _num_said(self, ids: list[int]) -> int:
        size = len(self._opening)
        starts = (
            at for at in range(len(ids) - size, -1, -1) if ids[at : at + size] == self._opening
        )
        return len(ids) - next(starts) - size


def let_say(generator: RolloutGenerator, text: str) -> None:
    """Force `text` as every later answer."""
    script = Script(byte_tokenizer(), text)
    manager = generator.manager
    manager.defaults = replace(manager.defaults, logits_processors=(script,))


class Leaning(Script):
    """A logits processor that prefers one text, where a grammar may allow another."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        num_said = self._num_said(input_ids[0].tolist())
        token = self._tokens[min(num_said, len(self._tokens) - 1)]
        preferred = scores.clone()
        preferred[0, token] += 1000.0
        return preferred


def let_prefer(generator: RolloutGenerator, text: str) -> None:
    """Prefer `text` as every later answer."""
    script = Leaning(byte_tokenizer(), text)
    manager = generator.manager
    manager.defaults = replace(manager.defaults, logits_processors=(script,))


class Asked:
    """One request of `/inference/v1/generate`, in a thread of its own."""

    def __init__(self, post: Callable[..., Any], name: str, **sampling: Any) -> None:
        params = {"max_tokens": 2000, "ignore_eos": True, "logprobs": 0, **sampling}
        body = {"request_id": name, "token_ids": [5, 6], "sampling_params": params}
        self._thread = threading.Thread(target=self._run, args=(post, body))
        self._thread.start()

    def _run(self, post: Callable[..., Any], body: dict[str, Any]) -> None:
        self.answer = post("/inference/v1/generate", body)

    def choice(self) -> dict[str, Any]:
        """Return its one choice, once it is answered."""
        self.join()
        assert self.answer.status_code == 200, self.answer.text
        return self.answer.json()["choices"][0]

    def join(self) -> None:
        """Wait for the answer."""
        self._thread.join(TIMEOUT_SECONDS)


def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition; fail after a time-out."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def num_sampled(generator: RolloutGenerator) -> int:
    """Return the number of tokens sampled so far."""
    return generator.manager.counters.tokens_generated


def num_waiting(generator: RolloutGenerator) -> int:
    """Return the number of sequences that have not begun."""
    return len(generator.manager.loop._inbox) + generator.manager.engine.status().requests_waiting


def running(generator: RolloutGenerator, count: int) -> None:
    """Wait until so many sequences run, and one more token was sampled."""
    until(lambda: generator.manager.status().requests_running == count)
    before = num_sampled(generator)
    until(lambda: num_sampled(generator) > before)
