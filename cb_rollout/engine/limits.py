"""What one engine may use at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that never change while an engine runs."""

    block_size: int
    max_batch_tokens: int
    max_requests: int
    can_share_blocks: bool
    """Whether a group may share its prompt's whole blocks, or must copy them."""
    can_resume_prompts: bool
    """False where a layer is recurrent: no chunk or known prefix can be continued from its keys."""

    prefills_first: bool = False
    """Whether running sequences wait while any prompt could run."""

    @property
    def can_match_prefixes(self) -> bool:
        """Whether blocks of one sequence may serve a later one."""
        return self.can_share_blocks and self.can_resume_prompts
