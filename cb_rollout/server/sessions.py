"""Keep the exact tokens of agents' sessions, for training on them.

An agent gets an OpenAI base URL for each session. Every answered call is a turn of its trajectory;
calls that rewrite the history are branches. Used by the server's thread and the training thread.
"""

import threading
import uuid
from dataclasses import dataclass, field

from cb_rollout.errors import RolloutError
from cb_rollout.rollout.trajectories import Trajectory
from cb_rollout.server.protocol import ApiError
from cb_rollout.types import GenerationOutput

# A client that opens sessions and closes none must not fill the memory.
MAX_SESSIONS = 4096


@dataclass(slots=True, eq=False)
class Session:
    """One conversation of an agent, or several that begin with the same tokens."""

    id: str
    base_url: str
    """For the agent's OpenAI client."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    outputs: list[GenerationOutput] = field(default_factory=list)
    """The answered calls, in the order in which they ended."""
    reward: float | None = None
    """None: the session has not ended."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def record(self, output: GenerationOutput) -> None:
        """Add an answered call, unless the session has ended."""
        if not self._ended.is_set():
            self.outputs.append(output)
            self.trajectory.add_turn(
                output.prompt_ids, output.generated_tokens, output.logprobs, output.policy_versions
            )

    def end(self, reward: float) -> None:
        """End the session with its first reward; calls that are answered later are not recorded."""
        if not self._ended.is_set():
            self.reward = float(reward)
            self._ended.set()

    def wait(self, timeout_seconds: float) -> float:
        """Wait for the reward, which another thread or a client sets, or raise `RolloutError`."""
        if not self._ended.wait(timeout_seconds):
            raise RolloutError(
                f"session {self.id} got no reward in {timeout_seconds:g} s; return it from the "
                "agent, or POST it to /sessions/ID/end."
            )
        assert self.reward is not None
        return self.reward


class Sessions:
    """The sessions of a server that are not closed, by id."""

    def __init__(self) -> None:
        self.url = ""
        """The server's root."""
        self._sessions: dict[str, Session] = {}

    def open(self) -> Session:
        """Open a session, or raise 429 if the maximum number is open."""
        if len(self._sessions) >= MAX_SESSIONS:
            raise ApiError(429, f"{MAX_SESSIONS} sessions are open; DELETE some.", "session")
        name = uuid.uuid4().hex
        session = Session(name, f"{self.url}/sessions/{name}/v1")
        self._sessions[name] = session
        return session

    def close(self, name: str) -> None:
        """Forget a session; its URL answers 404 from now on."""
        self._sessions.pop(name, None)

    def get(self, name: str) -> Session:
        """Return an open session, or raise 404."""
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(404, f"there is no open session {name!r:.100}.", "session")
        return session
