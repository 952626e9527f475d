"""Guesses what running sequences say next, from what they and their group have said already.

Completions of one prompt resemble each other, and themselves. A guessed run of tokens is a *draft*:
its tokens run as further rows of the sequence's decode step, every row is sampled as ever, and the
first token that differs from the draft ends it. So a draft decides how many tokens a step brings,
and nothing about which. Knows tokens, never tensors.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

from cb_rollout.engine.echoes import Echoes
from cb_rollout.engine.request import Request

MOST_ROWS = 16
# Of a step with drafts: up to here a further row costs linear layers a small part of the first one,
# as the bench's `roofline` prints.

MOST_DRAFTED = 7
# Tokens of one draft, where nobody says another number.

LEARNING, RECOVERING = 0.25, 0.01
# How fast the luck of a group follows its last draft, and rises where none is made.


class Drafter:
    """Drafts for one engine."""

    def __init__(self, most_drafted: int | None) -> None:
        """Draft at most so many tokens at once; None: `MOST_DRAFTED`."""
        self._most_drafted = MOST_DRAFTED if most_drafted is None else most_drafted
        self._groups: WeakValueDictionary[int, Echoes] = WeakValueDictionary()

    def listen(self, requests: Sequence[Request]) -> None:
        """Follow sequences that got their first token; those that are followed go on to be."""
        for request in requests:
            if request.echoes is not None or request.status.is_final:
                continue
            echoes = self._groups.get(request.group) if request.group is not None else None
            num_known = len(request.prompt_ids) if echoes else 0
            request.echoes = echoes = echoes or Echoes()
            if request.group is not None:
                self._groups[request.group] = echoes
            echoes.listen(request.token_ids, num_known)

    def most_drafted(self, num_rows: int) -> int:
        """Tokens of the longest draft that each of so many sequences may have."""
        return max(0, min(self._most_drafted, MOST_ROWS // num_rows - 1)) if num_rows else 0

    def drafts(self, running: Sequence[Request]) -> list[list[int]]:
        """What each sequence is expected to say; empty where none is to be tried.

        Args:
            running: all rows of the coming decode step.
        """
        most = self.most_drafted(len(running))
        if not most or any(r.is_adjusted or r.params.top_logprobs for r in running):
            return []
        drafts = [self._draft(request, most) for request in running]
        return drafts if any(drafts) else []

    def _draft(self, request: Request, most: int) -> list[int]:
        echoes = request.echoes
        if echoes is None or request.is_streaming:
            return []
        wanted = round(echoes.luck * most)
        if not wanted:
            echoes.luck = min(1.0, echoes.luck + RECOVERING)
        # The last token of a sequence is sampled, never drafted.
        left = request.max_new_tokens - request.num_generated - 1
        return echoes.expected(request.token_ids, min(wanted, left)) if min(wanted, left) else []

    def note(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn how a draft fared."""
        if num_drafted and request.echoes is not None:
            echoes = request.echoes
            echoes.luck += LEARNING * (num_accepted / num_drafted - echoes.luck)
