"""Define the protocols of constrained decoding; `integrations.xgrammar` implements them."""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class GrammarMatcher(Protocol):
    """Track the state of one sequence in its grammar; called on the engine's thread."""

    def fill_allowed_tokens(self, mask_V: "torch.Tensor") -> None:
        """Set True for each allowed next token in `mask_V`: bool, one per logit, CPU, all False."""
        ...

    def accept_token(self, token_id: int) -> bool:
        """Advance by one sampled token; return False if the grammar forbids it."""
        ...

    def is_terminated(self) -> bool:
        """Return True if no token may follow, which ends the sequence."""
        ...


@runtime_checkable
class Grammar(Protocol):
    """A grammar, shared by every sequence that is sampled under it."""

    def matcher(self) -> GrammarMatcher:
        """Create the matcher of a new sequence."""
        ...
