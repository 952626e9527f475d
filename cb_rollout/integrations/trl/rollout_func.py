"""Make functions for `GRPOTrainer(rollout_func=...)` that sample by the attached engine.

Called by the trainer, on its thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.integrations.trl.backend import GenerationBackend, require_backend
from cb_rollout.integrations.trl.guard import require_one_distribution, warn_of_bias
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.generator import RolloutGenerator, measured
from cb_rollout.rollout.trajectories import Sample

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
"""Takes the prompts and the trainer; returns columns."""

Agent = Callable[[str, Any], float | None]
"""Takes an OpenAI base URL and a prompt; returns the reward."""


def make_rollout_func(sampling_params: SamplingParams | None = None) -> RolloutFunc:
    """Make a `rollout_func` for `GRPOTrainer` that samples one completion of every prompt.

    Pass it to the trainer as it is, or call it, once or for each turn, from a function of your own.
    The trainer must be attached when it trains. `sampling_params` None: the trainer's. Others are
    checked as the trainer's are: a warning says where the loss is of another distribution, and what
    `sampling_mask="replay"` or `old_logps="rollout"` excludes is refused.

    Returns:
        A function of prompts (texts, chats or token ids) and the trainer, which returns
        `prompt_ids`, `completion_ids` and `logprobs`, one list for each prompt.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        backend = require_backend(trainer, "make_rollout_func")
        ids = prompts
        if prompts and not all(_are_token_ids(prompt) for prompt in prompts):
            ids, _, _ = trainer._tokenize_prompts(prompts)
        if sampling_params is not None and trainer.model.training:
            config = backend.generator.config
            require_one_distribution(config, sampling_params)
            warn_of_bias(trainer, config, sampling_params)
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
    """Make a `rollout_func` of an agent that knows only an OpenAI base URL.

    The policy is served on this machine, with a base URL for each completion. Trained on are the
    sampled tokens; where an agent rewrites its history, the part that has the most of them. The
    agent leaves sampling parameters out: they are the trainer's. With `reward_funcs=agent_reward`
    the rewards are the agents'.

    Args:
        agent: called as `agent(base_url, prompt)`, in a thread of its own. Returns the reward; or
            None, and somebody POSTs it to `/sessions/ID/end`. An exception ends the training.
        num_threads: agents that run together.
        timeout_seconds: longest request of an agent, and longest wait for a reward.
    """

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        backend = require_backend(trainer, "make_agent_rollout")
        generator = backend.generator
        if not isinstance(generator, RolloutGenerator):
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
        backend.context.calls.append([output for s in sessions for output in s.outputs])
        status = status_metrics(generator.manager.status())
        backend.context.turn_metrics.append(metrics | status)
        _log_left_out(backend, [session.trajectory.samples for session in sessions])
        samples = [max(s.trajectory.samples, key=_num_sampled) for s in sessions]
        starts = [sample.is_sampled.index(True) for sample in samples]
        parts = list(zip(samples, starts, strict=True))
        return {
            "prompt_ids": [sample.token_ids[:start] for sample, start in parts],
            "completion_ids": [sample.token_ids[start:] for sample, start in parts],
            "logprobs": [sample.logprobs[start:] for sample, start in parts],
            "env_mask": [list(map(int, sample.is_sampled[start:])) for sample, start in parts],
            "agent_reward": [session.reward for session in sessions],
        }

    return rollout


def agent_reward(completions: list[Any], agent_reward: list[float], **_: Any) -> list[float]:
    """Return the rewards of `make_agent_rollout`'s agents: a reward function for `GRPOTrainer`."""
    return agent_reward


def _num_sampled(sample: Sample) -> int:
    return sum(sample.is_sampled)


def _log_left_out(backend: GenerationBackend, sessions: Sequence[Sequence[Sample]]) -> None:
    counts = [sorted(map(_num_sampled, samples)) for samples in sessions]
    left_out = sum(sum(count[:-1]) for count in counts) / sum(map(sum, counts))
    backend.log({"rollout/agent_tokens_left_out": left_out}, backend.context.mode)


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
