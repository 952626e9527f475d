"""What becomes of the keys of preempted sequences: by default they are forgotten."""

from cb_rollout.engine.request import Request


class KeyStore:
    """Keeps nothing: whoever resumes computes its keys anew."""

    def save(self, request: Request) -> None:
        """A sequence is about to lose its blocks."""

    def restore(self, request: Request) -> None:
        """A sequence was given blocks again; what is put back into them counts as computed."""

    def drop(self, request: Request) -> None:
        """A sequence ended."""

    def clear(self) -> None:
        """The policy ended under which keys were computed."""
