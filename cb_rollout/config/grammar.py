"""What a constrained-decoding library must offer: which tokens may come next.

Owns the two protocols and nothing else; `cb_rollout.integrations.xgrammar` is one implementation.
"""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class GrammarMatcher(Protocol):
    """How far one sequence has come through its grammar; called on the engine's thread."""

    def fill_allowed_tokens(self, mask_V: "torch.Tensor") -> None:
        """Set True where a token may come next.

        Args:
            mask_V: bool, one entry per logit, on the CPU; all False when it arrives.
        """
        ...

    def accept_token(self, token_id: int) -> bool:
        """Go on by one sampled token; False where the grammar does not allow it."""
        ...

    def is_terminated(self) -> bool:
        """Whether nothing may follow; the sequence then ends."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """A grammar; shared by every sequence that is sampled under it, and never changed by one."""

    def matcher(self) -> GrammarMatcher:
        """A new sequence's place: the start."""
        ...
