"""What was changed on a trainer, so that it can be put back.

Owns nothing of what the changes mean.
"""

from typing import Any

_ABSENT = object()


class TrainerHooks:
    """Attributes of a trainer that stand in for its own, and what they stand in for."""

    def __init__(self, trainer: Any) -> None:
        """Change nothing yet."""
        self._trainer = trainer
        self._before: dict[str, Any] = {}

    def put(self, name: str, value: Any) -> None:
        """Set an attribute of the trainer; of several values for one name, the last stands."""
        own = vars(self._trainer)
        self._before.setdefault(name, own.get(name, _ABSENT))
        setattr(self._trainer, name, value)

    def restore(self) -> None:
        """Give the trainer back every attribute that it had, and none that it had not."""
        for name, value in self._before.items():
            if value is _ABSENT:
                vars(self._trainer).pop(name, None)
            else:
                setattr(self._trainer, name, value)
        self._before.clear()
