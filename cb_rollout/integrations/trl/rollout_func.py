"""Make functions for `GRPOTrainer(rollout_func=...)` that sample with the attached engine.

Called by the trainer, on its thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.integrations.trl.backend import GenerationBackend, require_backend
from cb_rollout.integrations.trl.guard import (
    loss_temperature,
    require_one_distribution,
    warn_of_bias,
)
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.generator import measured
from cb_rollout.rollout.trajectories import Sample

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""Takes the prompts and the trainer; returns columns."""

Agent = Callable[[str, Any], float | None]
"""Takes an OpenAI base URL and a prompt; returns the reward."""


def make_rollout_func(sampling_params: SamplingParams | None = None) -> RolloutFunc:
    """Make a `rollout_func` for `GRPOTrainer` that samples one completion for each prompt.

    Pass it to the trainer, or call it from your own function, once or for each turn. The trainer
    must be attached before it trains. Without `sampling_params`, the trainer's apply. Your own are
    checked in the same way: a warning tells you if they sample from a distribution other than the
    loss's, and parameters that `sampling_mask="replay"` or `old_logps="rollout"` does not support
    are refused.

    Returns:
        A function of prompts (texts, chats or token ids) and the trainer, which returns
        `prompt_ids`, `completion_ids` and `logprobs`, one list for each prompt.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        backend = require_backend(trainer, "make_rollout_func")
        ids = prompts
        if not all(map(_are_token_ids, prompts)):
            ids, _, _ = trainer._tokenize_prompts(prompts)
        if sampling_params is not None and trainer.model.training:
            config = backend.generator.config
            require_one_distribution(config, sampling_params)
            divisor = loss_temperature(trainer, config, backend.made_at_temperature)
            warn_of_bias(trainer, config, sampling_params, divisor)
        outputs = backend.sample(ids, sampling_params)
        return {
            "prompt_ids": ids,
            "completion_ids": [list(output.generated_tokens) for output in outputs],
            "logprobs": [list(output.logprobs) for output in outputs],
        }

    return rollout


def make_agent_rollout(
    agent: Agent, *, num_threads: int = 64, timeout_seconds: float = 600.0
) -> RolloutFunc:
    """Make a `rollout_func` from an agent that talks to an OpenAI base URL.

    The policy is served on this machine, with a base URL for each completion. The trainer trains on
    the sampled tokens; if an agent rewrites its history, on the branch with the most sampled
    tokens. The agent should not set sampling parameters, so that the trainer's apply. Pass
    `reward_funcs=agent_reward` to use the agents' rewards.

    Args:
        agent: called as `agent(base_url, prompt)`, in its own thread. Returns the reward as a
            number, or None if another process POSTs it to `/sessions/ID/end`. An exception ends the
            training.
        num_threads: number of agents that run at the same time.
        timeout_seconds: time limit of an agent's request, and of the wait for a reward.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        backend = require_backend(trainer, "make_agent_rollout")
        generator = backend.generator.local_generator
        if generator is None:
            raise ConfigurationError(
                "make_agent_rollout() serves an engine of this process; attach a RolloutConfig."
            )
        options = {"port": 0, "request_timeout_seconds": timeout_seconds}

        def play(prompt: Any) -> Any:
            with server.session() as session:
                reward = agent(session.base_url, prompt)
                if reward is not None:
                    session.end(reward)
                session.wait(timeout_seconds)
            if not session.outputs:
                raise RolloutError(f"the agent made no request for {prompt!r:.200}")
            return session

        backend.warm_up()
        generator.wake()
        with (
            generator.serve(**options) as server,
            measured(generator.manager) as metrics,
            ThreadPoolExecutor(num_threads, "cb_rollout agent") as threads,
        ):
            sessions = list(threads.map(play, prompts))
        outputs = []
        for session in sessions:
            outputs += session.outputs
        backend.context.calls.append(outputs)
        status = status_metrics(generator.manager.status())
        backend.context.turn_metrics.append(metrics | status)
        _log_left_out(backend, [session.trajectory.samples for session in sessions])
        return _columns(sessions)

    return rollout


def agent_reward(completions: list[Any], agent_reward: list[float], **_: Any) -> list[float]:
    """Return the rewards of `make_agent_rollout`'s agents: a reward function for `GRPOTrainer`."""
    return agent_reward


def _num_sampled(sample: Sample) -> int:
    return sum(sample.is_sampled)


def _columns(sessions: Sequence[Any]) -> dict[str, Any]:
    """Return TRL's columns of a `rollout_func`: each session's sample with the most tokens."""
    columns: dict[str, list[Any]] = {
        "prompt_ids": [],
        "completion_ids": [],
        "logprobs": [],
        "env_mask": [],
        "agent_reward": [],
    }
    for session in sessions:
        sample = max(session.trajectory.samples, key=_num_sampled)
        start = sample.is_sampled.index(True)
        columns["prompt_ids"].append(sample.token_ids[:start])
        columns["completion_ids"].append(sample.token_ids[start:])
        columns["logprobs"].append(sample.logprobs[start:])
        columns["env_mask"].append(list(map(int, sample.is_sampled[start:])))
        columns["agent_reward"].append(session.reward)
    return columns


def _log_left_out(backend: GenerationBackend, sessions: Sequence[Sequence[Sample]]) -> None:
    """Log the share of sampled tokens that are in no row of the batch."""
    num_sampled = 0
    num_trained = 0
    for samples in sessions:
        counts = list(map(_num_sampled, samples))
        num_sampled += sum(counts)
        num_trained += max(counts)
    left_out = (num_sampled - num_trained) / num_sampled
    backend.log({"rollout/agent_tokens_left_out": left_out}, backend.context.mode)


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
