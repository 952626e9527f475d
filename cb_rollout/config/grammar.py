"""Define two protocols of constrained decoding; `integrations.xgrammar` is an implementation."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class GrammarMatcher(Protocol):
    """State of one sequence in its grammar; called on the engine's thread."""

    def fill_allowed_tokens(self, mask_V: "torch.Tensor") -> None:
        """Set True where a token may come next; `mask_V`: bool, one per logit, CPU, all False."""
        ...

    def accept_token(self, token_id: int) -> bool:
        """Advance by one sampled token; return False where the grammar forbids it."""
        ...

    def is_terminated(self) -> bool:
        """Return True when no token may follow; the sequence then ends."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """A grammar, shared by every sequence that is sampled under it."""

    def matcher(self) -> GrammarMatcher:
        """Return the state of a new sequence."""
        ...
