"""Completions as HTML: tokens tinted by log-probability, with their numbers on hover; pictures.

This module owns the colour scale, and the escaping of HTML and invisible characters. Every function
is pure.
"""

import base64
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from statistics import fmean

from cb_rollout.metrics.run_records import SequenceRecord, TokenRow
from cb_rollout.tools.report.figures import without_overflow
from cb_rollout.tools.report.svg import compact

# More tints cannot be told apart behind text.
NUM_LEVELS = 10

# The last tint begins at -6.75 nats, one in a thousand.
NATS_PER_LEVEL = 0.75

# A longer completion is shown without its middle: the answer is usually at its end.
MAX_TOKENS_SHOWN = 900
MAX_TOKENS_AT_THE_END = 300

MAX_PROMPT_CHARACTERS = 600

SPECIAL_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")

# Part of many emoji; all other format characters are shown by their code.
_ZERO_WIDTH_JOINER = "\u200d"


def colour_level(logprob: float) -> int:
    """Map a log-probability to a tint, from 0 (likely) to `NUM_LEVELS - 1` (improbable)."""
    highest = NUM_LEVELS - 1
    # For a log-probability near the largest float, the quotient is infinite.
    return math.floor(max(0.0, min(highest, -logprob / NATS_PER_LEVEL)))


def legend_html() -> str:
    """Return the colour scale, from likely to improbable."""
    swatches = "".join(f'<span class="l{level}"></span>' for level in range(NUM_LEVELS))
    last = -(NUM_LEVELS - 1) * NATS_PER_LEVEL
    return (
        '<div class="legend" aria-label="colour scale of log-probabilities">'
        f'<span>likely <b>0</b></span><span class="scale">{swatches}</span>'
        f"<span><b>{last:g}</b> nats or less, improbable</span></div>"
    )


def sequences_html(
    sequences: Sequence[SequenceRecord], read_image: Callable[[str], bytes | None] = lambda _: None
) -> str:
    """Return sequences as HTML: each prompt once, above its completions, with pictures as PNG."""
    groups = groupby(sequences, key=lambda sequence: (sequence.prompt, sequence.images))
    html = ""
    for (prompt, images), members in groups:
        completions = "".join(map(_completion_html, members))
        html += f'<div class="group">{_images_html(images, read_image)}'
        html += f"{_prompt_html(prompt)}{completions}</div>"
    return html


def visible_html(text: str, *, marks_spaces: bool = False) -> str:
    """Escape text for HTML, showing invisible characters; `marks_spaces`: mark newlines, tabs."""
    return "".join(_visible_character(character, marks_spaces) for character in text)


def _visible_character(character: str, marks_spaces: bool) -> str:
    if character == "\n":
        return '<u class="mark">&crarr;</u>\n' if marks_spaces else "\n"
    if character == "\t":
        return '<u class="mark">&rarr;</u>\t' if marks_spaces else "\t"
    is_hidden = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    if is_hidden and character != _ZERO_WIDTH_JOINER:
        return f'<u class="mark code">U+{ord(character):04X}</u>'
    return escape(character)


def _images_html(names: Sequence[str], read_image: Callable[[str], bytes | None]) -> str:
    pictures = ""
    for number, name in enumerate(names, 1):
        png = read_image(name)
        if png is None:
            pictures += f"<span>picture {number} is not there any more</span>"
            continue
        url = f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"
        pictures += f'<img alt="picture {number} of the prompt" src="{url}">'
    return f'<div class="pictures">{pictures}</div>' if pictures else ""


def _prompt_html(prompt: str) -> str:
    if len(prompt) <= MAX_PROMPT_CHARACTERS:
        return f'<div class="prompt">{visible_html(prompt)}</div>'
    return (
        '<details class="prompt"><summary><span class="more">whole prompt, '
        f'{len(prompt):,} characters</span><span class="end">&hellip;'
        f"{visible_html(prompt[-MAX_PROMPT_CHARACTERS:])}</span></summary>"
        f"{visible_html(prompt)}</details>"
    )


def _completion_html(sequence: SequenceRecord) -> str:
    return (
        f'<article class="completion"><header>{"".join(_facts(sequence))}</header>'
        f'<div class="tokens">{_tokens_html(sequence)}</div></article>'
    )


def _facts(sequence: SequenceRecord) -> Iterator[str]:
    if sequence.reward is not None:
        yield f'<span class="reward">reward <b>{sequence.reward:.4g}</b></span>'
    if sequence.mode == "eval":
        yield '<span class="chip">eval</span>'
    num_tokens = len(sequence.tokens)
    yield f"<span>{num_tokens:,} {'token' if num_tokens == 1 else 'tokens'}</span>"
    if sequence.finish_reason is not None:
        yield f"<span>ended by {visible_html(sequence.finish_reason)}</span>"
    finite = [value for value in sequence.logprobs if math.isfinite(value)]
    if finite:
        yield f"<span>mean {_nats(without_overflow(fmean, finite))} nats</span>"
    versions = [str(version) for version, _ in sequence.policy_versions]
    if versions:
        noun = "policy" if len(versions) == 1 else "policies"
        yield f"<span>{noun} {', '.join(versions)}</span>"
    yield f'<span class="id">{visible_html(sequence.request_id)}</span>'


def _tokens_html(sequence: SequenceRecord) -> str:
    """Return a completion's tokens; a long completion loses those in the middle."""
    rows = list(sequence.token_rows())
    gap_at = MAX_TOKENS_SHOWN - MAX_TOKENS_AT_THE_END
    num_hidden = len(rows) - MAX_TOKENS_SHOWN
    html = ""
    version_before = None
    for place, row in enumerate(rows):
        if num_hidden > 0 and gap_at <= place < gap_at + num_hidden:
            if place == gap_at:
                text = f"{num_hidden:,} of {len(rows):,} tokens are left out here"
                html += f'<div class="gap">{text}</div>'
            continue
        html += _token_html(row, version_before)
        version_before = row.policy_version
    return html


def _token_html(row: TokenRow, version_before: int | None) -> str:
    classes = ["ln" if row.logprob is None else f"l{colour_level(row.logprob)}"]
    if SPECIAL_TOKEN.fullmatch(row.token):
        classes.append("special")
    if version_before not in (None, row.policy_version):
        classes.append("switch")
    text = visible_html(row.token, marks_spaces=True)
    if not row.token.strip(" "):
        text = f'<u class="mark">{"&middot;" * len(row.token) or "&empty;"}</u>'
    return f'<span class="{" ".join(classes)}" title="{_tooltip(row)}">{text}</span>'


def _tooltip(row: TokenRow) -> str:
    if row.logprob is None:
        logprob = "log-probability not recorded"
    else:
        share = 100 * math.exp(min(row.logprob, 0.0))
        logprob = f"log-probability {_nats(row.logprob)} ({share:.3g}%)"
    policy = "not recorded" if row.policy_version is None else row.policy_version
    return f"{logprob}&#10;token id {row.token_id}&#10;policy version {policy}"


def _nats(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e6 else compact(value)
