"""Sample rollouts on the machines of a Ray cluster: `RolloutPool`. Needs the extra `ray`.

Owns the pool of workers, the distribution of sequences over them, and the weights that go out to
them. Called from training code. Ray starts processes and carries bytes; `cluster` alone imports it.
"""

from cb_rollout.integrations.ray.pool import RolloutPool

__all__ = ["RolloutPool"]
