"""Find known names that resemble an unknown name, by its spelling or by its words.

Loads no torch.
"""

import difflib
from collections.abc import Collection, Mapping

# difflib's default cutoff.
LEAST_RATIO = 0.6

# An unknown name that is less similar to ours is also compared with other projects' names, and by
# its words.
CLEAR_RATIO = 0.85

# Words that do not show which setting is meant.
COMMON_WORDS = frozenset(
    ("max", "min", "num", "use", "per", "is", "of", "the", "enable", "default")
)

MAX_NAMES = 3


def nearest_names(name: str, known: Collection[str], synonyms: Mapping[str, str]) -> list[str]:
    """Return the likeliest replacements for an unknown name; empty if no name is similar.

    Args:
        name: the unknown name.
        known: the known names.
        synonyms: maps each name of another project to the name to write instead.
    """
    if name in synonyms:
        return [synonyms[name]]
    clear = difflib.get_close_matches(name, known, n=1, cutoff=CLEAR_RATIO)
    if clear:
        return clear
    clear = difflib.get_close_matches(name, synonyms, n=1, cutoff=CLEAR_RATIO)
    if clear:
        return [synonyms[clear[0]]]
    by_words = _sharing_words(name, known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=LEAST_RATIO)
    if close and (not by_words or close[0] in by_words):
        return close
    return by_words or close


def hint(names: Collection[str]) -> str:
    """Return a question that suggests the names: "did you mean ...?"."""
    quoted = [repr(name) for name in names]
    if len(quoted) == 1:
        return f"did you mean {quoted[0]}?"
    return f"did you mean {', '.join(quoted[:-1])} or {quoted[-1]}?"


def _sharing_words(name: str, known: Collection[str]) -> list[str]:
    """Return the known names that share most of their significant words with `name`."""
    words = _words(name)
    scores: dict[str, float] = {}
    for other in known:
        others = _words(other)
        if words & others:
            scores[other] = len(words & others) / len(words | others)
    if not scores:
        return []
    highest = max(scores.values())
    best = [other for other, score in scores.items() if score == highest]
    return best[:MAX_NAMES]


def _words(name: str) -> frozenset[str]:
    """Return the significant words of a name, in the singular."""
    words: set[str] = set()
    for word in name.lower().replace("-", "_").split("_"):
        singular = word.removesuffix("s")
        if singular and singular not in COMMON_WORDS:
            words.add(singular)
    return frozenset(words)
