"""Define the Triton kernels that sample inside a captured step, in one pass over the logits.

`measure_kernel` reads each part of a row once and computes its largest score and its sum of
exponentials, both for the model's distribution and for the sampled one. `truncate_kernel` searches
for the smallest weight that top-k, top-p and min-p keep, a few bits at a time, and skips parts
whose largest weight is smaller. `draw_kernel` joins the parts, draws a token from one uniform
number in one part, and writes the next step's inputs. The last two run one program per row, which
ends at once if the row needs nothing.

A score is a logit divided by the temperature, or -inf for a token that is never sampled. A weight
is the exponential of a score minus the row's largest score. A part is `CHUNK` tokens in every
batch, so sums do not depend on other rows. `sampling.draw` is the reference.
"""

import triton
import triton.language as tl

from cb_rollout.engine.cuda_graphs.inputs import Line

# Tokens of a part.
CHUNK = 4096

# What is stored of each part: the model's own distribution, the one that is sampled from, and the
# sum that truncation keeps, relative to the row's largest score.
OWN_LARGEST = tl.constexpr(0)
OWN_SUM = tl.constexpr(1)
LARGEST = tl.constexpr(2)
SUM = tl.constexpr(3)
KEPT_SUM = tl.constexpr(4)
NUM_MEASURES = tl.constexpr(5)

# What is stored of a truncated row.
LEAST_WEIGHT = tl.constexpr(0)
LOG_MASS = tl.constexpr(1)
NUM_KEPT = tl.constexpr(2)
NUM_LIMITS = tl.constexpr(3)

# What is stored of each row's token, in float64.
TOKEN = tl.constexpr(0)
LOGPROB = tl.constexpr(1)
IS_VALID = tl.constexpr(2)
IS_POSSIBLE = tl.constexpr(3)
RESULT_LOG_MASS = tl.constexpr(4)
RESULT_NUM_KEPT = tl.constexpr(5)
NUM_RESULTS = tl.constexpr(6)

# Digits of two bits that are searched in a float32 weight: its sign is 0, and so is the next bit.
NUM_DIGITS = tl.constexpr(15)

# More than any token id.
NO_TOKEN = tl.constexpr(2147483647)

TOKEN_LINE = tl.constexpr(int(Line.TOKEN))
LENGTH_LINE = tl.constexpr(int(Line.LENGTH))
SEED_LINE = tl.constexpr(int(Line.SEED))
INDEX_LINE = tl.constexpr(int(Line.INDEX))
IS_GREEDY_LINE = tl.constexpr(int(Line.IS_GREEDY))
TEMPERATURE_LINE = tl.constexpr(int(Line.TEMPERATURE))
IS_KEPT_LINE = tl.constexpr(int(Line.IS_KEPT))
TOP_K_LINE = tl.constexpr(int(Line.TOP_K))
TOP_P_LINE = tl.constexpr(int(Line.TOP_P))
MIN_P_LINE = tl.constexpr(int(Line.MIN_P))


@triton.jit
def _integer(lines, line_stride, row, LINE: tl.constexpr):
    return tl.load(lines + LINE * line_stride + row)


@triton.jit
def _number(lines, line_stride, row, LINE: tl.constexpr):
    bits = tl.load(lines + LINE * line_stride + row)
    return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _is_sampled(lines, line_stride, row):
    is_row = _integer(lines, line_stride, row, LENGTH_LINE) > 0
    return is_row & (_integer(lines, line_stride, row, IS_KEPT_LINE) == 0)


@triton.jit
def _is_truncated(lines, line_stride, row):
    top_k = _integer(lines, line_stride, row, TOP_K_LINE)
    top_p = _number(lines, line_stride, row, TOP_P_LINE)
    return (top_k > 0) | (top_p < 1.0) | (_number(lines, line_stride, row, MIN_P_LINE) > 0.0)


@triton.jit
def _read(logits, logits_stride, row, ids, vocab_size):
    """Return the model's logits of some tokens of a row, float32; -inf beyond the vocabulary.

    Args:
        logits: of all rows, in the model's dtype.
        logits_stride: numbers from one row to the next.
        row: the row's index.
        ids: the tokens.
        vocab_size: numbers of a row.
    """
    at = logits + row.to(tl.int64) * logits_stride + ids
    return tl.load(at, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _scores(values, ids, lines, line_stride, row, never, NUM_NEVER: tl.constexpr):
    """Return the scores that a row samples from, given some of the model's logits.

    Args:
        values: the model's logits of these tokens, float32.
        ids: the tokens.
        lines: of `GraphInputs`.
        line_stride: numbers from one line to the next.
        row: the row's index.
        never: token ids that are never sampled.
        NUM_NEVER: how many there are.
    """
    for place in tl.static_range(NUM_NEVER):
        values = tl.where(ids == tl.load(never + place), float("-inf"), values)
    return values / _number(lines, line_stride, row, TEMPERATURE_LINE)


@triton.jit
def _read_scores(source, row, ids, NUM_NEVER: tl.constexpr):
    """Return the scores of some of a row's tokens, which it samples from."""
    logits, lines, never, line_stride, logits_stride, vocab_size = source
    values = _read(logits, logits_stride, row, ids, vocab_size)
    return _scores(values, ids, lines, line_stride, row, never, NUM_NEVER)


@triton.jit
def _weights(scores, largest):
    """Return exponentials relative to the largest score; zeros if every score is -inf."""
    return tl.exp(scores - tl.where(largest == float("-inf"), 0.0, largest))


@triton.jit
def measure_kernel(
    logits, kept, measures, lines, never,
    line_stride, logits_stride, vocab_size, num_parts,
    NUM_NEVER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Measure one part of a row, or keep its logits. Runs one program per part and row.

    Args:
        logits: of all rows, in the model's dtype.
        kept: logits of rows that keep them, to write to.
        measures: float32, `[rows, NUM_MEASURES, num_parts]`, to write to.
        lines: of `GraphInputs`.
        never: token ids that are never sampled.
        line_stride: numbers from one line to the next.
        logits_stride: numbers from one row of logits to the next.
        vocab_size: tokens of the vocabulary.
        num_parts: parts of a row.
        NUM_NEVER: length of `never`.
        CHUNK: tokens of a part.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    if _integer(lines, line_stride, row, LENGTH_LINE) > 0:
        ids = part * CHUNK + tl.arange(0, CHUNK)
        values = _read(logits, logits_stride, row, ids, vocab_size)
        if _integer(lines, line_stride, row, IS_KEPT_LINE) > 0:
            targets = kept + row.to(tl.int64) * vocab_size + ids
            tl.store(targets, values, mask=ids < vocab_size)
        else:
            at = measures + row.to(tl.int64) * NUM_MEASURES * num_parts + part
            scores = values / _number(lines, line_stride, row, TEMPERATURE_LINE)
            largest = tl.max(scores, 0)
            total = tl.sum(_weights(scores, largest), 0)
            tl.store(at + OWN_LARGEST * num_parts, largest)
            tl.store(at + OWN_SUM * num_parts, total)
            if NUM_NEVER > 0:
                scores = _scores(values, ids, lines, line_stride, row, never, NUM_NEVER)
                largest = tl.max(scores, 0)
                total = tl.sum(_weights(scores, largest), 0)
            tl.store(at + LARGEST * num_parts, largest)
            tl.store(at + SUM * num_parts, total)


@triton.jit
def _search(
    source, largest_of_parts, num_parts, row, largest, least, target,
    IS_MASS: tl.constexpr, NUM_NEVER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the largest weight at which tokens of at least this weight reach a target; else 0.

    The target is a number of tokens, or with `IS_MASS` a sum of weights that are at least `least`.
    Each pass tries three weights, which decides two bits.

    Args:
        source: arguments of `_read_scores`.
        largest_of_parts: largest score of each part.
        num_parts: parts of the row.
        row: the row's index.
        largest: the row's largest score.
        least: least weight that counts.
        target: number or sum to reach.
        IS_MASS: True: the target is a sum of weights.
        NUM_NEVER: number of token ids that are never sampled.
        CHUNK: tokens of a part.
    """
    found = 0
    for digit in range(NUM_DIGITS):
        shift = 2 * (NUM_DIGITS - 1 - digit)
        first = (found + (1 << shift)).to(tl.float32, bitcast=True)
        second = (found + (2 << shift)).to(tl.float32, bitcast=True)
        third = (found + (3 << shift)).to(tl.float32, bitcast=True)
        firsts = tl.zeros([CHUNK], tl.float32)
        seconds = tl.zeros([CHUNK], tl.float32)
        thirds = tl.zeros([CHUNK], tl.float32)
        for part in range(num_parts):
            most = tl.exp(tl.load(largest_of_parts + part) - largest)
            if (most >= first) & (most >= least):
                ids = part * CHUNK + tl.arange(0, CHUNK)
                weights = tl.exp(_read_scores(source, row, ids, NUM_NEVER) - largest)
                counted = weights if IS_MASS else tl.full([CHUNK], 1.0, tl.float32)
                counted = tl.where(weights >= least, counted, 0.0)
                firsts += tl.where(weights >= first, counted, 0.0)
                seconds += tl.where(weights >= second, counted, 0.0)
                thirds += tl.where(weights >= third, counted, 0.0)
        num_reached = (tl.sum(firsts, 0) >= target).to(tl.int32)
        num_reached += (tl.sum(seconds, 0) >= target).to(tl.int32)
        num_reached += (tl.sum(thirds, 0) >= target).to(tl.int32)
        found += num_reached << shift
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _kept(
    source, measures, num_parts, row, largest, least, NUM_NEVER: tl.constexpr, CHUNK: tl.constexpr
):
    """Store, for each part, the sum of the weights that are at least `least`.

    Returns the sum of all these weights, and their number.

    Args:
        source: arguments of `_read_scores`.
        measures: of the row; `KEPT_SUM` is written.
        num_parts: parts of the row.
        row: the row's index.
        largest: the row's largest score.
        least: least weight that is kept.
        NUM_NEVER: number of token ids that are never sampled.
        CHUNK: tokens of a part.
    """
    mass = 0.0
    count = 0
    for part in range(num_parts):
        total = 0.0
        most = tl.exp(tl.load(measures + LARGEST * num_parts + part) - largest)
        if (most >= least) & (most > 0.0):
            ids = part * CHUNK + tl.arange(0, CHUNK)
            weights = tl.exp(_read_scores(source, row, ids, NUM_NEVER) - largest)
            is_kept = (weights >= least) & (weights > 0.0)
            total = tl.sum(tl.where(is_kept, weights, 0.0), 0)
            count += tl.sum(is_kept.to(tl.int32), 0)
        tl.store(measures + KEPT_SUM * num_parts + part, total)
        mass += total
    return mass, count


@triton.jit
def truncate_kernel(
    logits, measures, limits, lines, never,
    line_stride, logits_stride, vocab_size, num_parts,
    NUM_NEVER: tl.constexpr, CHUNK: tl.constexpr, PARTS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Find the least weight that a row's top-k, top-p and min-p keep. Runs a program for each row.

    Each rule keeps the most likely tokens down to some weight; equally likely ones stay or go
    together. Top-p counts what top-k keeps.

    Args:
        logits: as in `measure_kernel`.
        measures: written by `measure_kernel`; `KEPT_SUM` is written here.
        limits: float32, `[rows, NUM_LIMITS]`, to write to.
        lines: as in `measure_kernel`.
        never: as in `measure_kernel`.
        line_stride: as in `measure_kernel`.
        logits_stride: as in `measure_kernel`.
        vocab_size: as in `measure_kernel`.
        num_parts: as in `measure_kernel`.
        NUM_NEVER: as in `measure_kernel`.
        CHUNK: as in `measure_kernel`.
        PARTS_WIDTH: the next power of two of `num_parts`.
    """
    row = tl.program_id(0)
    if _is_sampled(lines, line_stride, row) & _is_truncated(lines, line_stride, row):
        measures += row.to(tl.int64) * NUM_MEASURES * num_parts
        parts = tl.arange(0, PARTS_WIDTH)
        at = measures + LARGEST * num_parts
        largest_of_parts = tl.load(at + parts, mask=parts < num_parts, other=float("-inf"))
        largest = tl.max(largest_of_parts, 0)
        largest = tl.where(largest == float("-inf"), 0.0, largest)
        sums = tl.load(measures + SUM * num_parts + parts, mask=parts < num_parts, other=0.0)
        whole = tl.sum(sums * tl.exp(largest_of_parts - largest), 0)
        source = logits, lines, never, line_stride, logits_stride, vocab_size
        least = 0.0
        top_k = _integer(lines, line_stride, row, TOP_K_LINE)
        if top_k > 0:
            least = _search(
                source, at, num_parts, row, largest, least,
                top_k.to(tl.float32), False, NUM_NEVER, CHUNK,
            )  # fmt: skip
        top_p = _number(lines, line_stride, row, TOP_P_LINE)
        if top_p < 1.0:
            mass, count = _kept(source, measures, num_parts, row, largest, least, NUM_NEVER, CHUNK)
            reached = _search(
                source, at, num_parts, row, largest, least, mass * top_p, True, NUM_NEVER, CHUNK
            )
            least = tl.maximum(least, reached)
        least = tl.maximum(least, _number(lines, line_stride, row, MIN_P_LINE))
        mass, count = _kept(source, measures, num_parts, row, largest, least, NUM_NEVER, CHUNK)
        limits += row * NUM_LIMITS
        tl.store(limits + LEAST_WEIGHT, least)
        tl.store(limits + LOG_MASS, tl.log(mass / whole))
        tl.store(limits + NUM_KEPT, count.to(tl.float32))


@triton.jit
def _joined(measures, num_parts, parts, LARGEST_AT: tl.constexpr, SUM_AT: tl.constexpr):
    """Return a row's largest score, and its parts' sums relative to that score, in float64.

    Args:
        measures: of the row.
        num_parts: parts of the row.
        parts: indices of parts, padded to a power of two.
        LARGEST_AT: the measure that holds the parts' largest scores.
        SUM_AT: the measure that holds their sums.
    """
    is_part = parts < num_parts
    largest_of_parts = tl.load(
        measures + LARGEST_AT * num_parts + parts, mask=is_part, other=float("-inf")
    )
    sums = tl.load(measures + SUM_AT * num_parts + parts, mask=is_part, other=0.0)
    largest = tl.max(largest_of_parts, 0)
    # A part without a token that may be sampled has a sum of 0.
    shares = sums.to(tl.float64) * _weights(largest_of_parts, largest).to(tl.float64)
    return largest, tl.where(is_part, shares, 0.0)


@triton.jit
def _share_sums(measures, limits, lines, line_stride, num_parts, row, parts):
    """Return the largest sampled score, each part's sum, and the smallest kept weight.

    Args:
        measures: of the row.
        limits: of all rows, written by `truncate_kernel`.
        lines: of `GraphInputs`.
        line_stride: numbers from one line to the next.
        num_parts: parts of the row.
        row: the row's index.
        parts: indices of parts, padded to a power of two.
    """
    largest, shares = _joined(measures, num_parts, parts, LARGEST, SUM)
    least = 0.0
    if _is_truncated(lines, line_stride, row):
        at = measures + KEPT_SUM * num_parts + parts
        shares = tl.load(at, mask=parts < num_parts, other=0.0).to(tl.float64)
        least = tl.load(limits + row * NUM_LIMITS + LEAST_WEIGHT)
    return largest, shares, least


@triton.jit
def _uniform(lines, line_stride, row):
    """Return the row's SplitMix64 number in [0, 1), in float64."""
    seed = _integer(lines, line_stride, row, SEED_LINE).to(tl.uint64)
    index = _integer(lines, line_stride, row, INDEX_LINE).to(tl.uint64)
    z = seed + (index + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def draw_kernel(
    logits, measures, limits, results, lines, never,
    line_stride, logits_stride, vocab_size, num_parts,
    NUM_NEVER: tl.constexpr, IS_PROCESSED: tl.constexpr, CHUNK: tl.constexpr,
    PARTS_WIDTH: tl.constexpr,
):  # fmt: skip
    """Draw a row's token, write its results, and make it the next step's input.

    Runs a program for each row.

    Args:
        logits: as in `measure_kernel`.
        measures: written by `measure_kernel` and `truncate_kernel`.
        limits: written by `truncate_kernel`.
        results: float64, `[rows, NUM_RESULTS]`, to write to.
        lines: of `GraphInputs`; the next step's token, length and index are written.
        never: as in `measure_kernel`.
        line_stride: as in `measure_kernel`.
        logits_stride: as in `measure_kernel`.
        vocab_size: as in `measure_kernel`.
        num_parts: as in `measure_kernel`.
        NUM_NEVER: as in `measure_kernel`.
        IS_PROCESSED: True: log-probabilities are of the distribution that is sampled from.
        CHUNK: as in `measure_kernel`.
        PARTS_WIDTH: as in `truncate_kernel`.
    """
    row = tl.program_id(0)
    if _is_sampled(lines, line_stride, row):
        measures += row.to(tl.int64) * NUM_MEASURES * num_parts
        parts = tl.arange(0, PARTS_WIDTH)
        own_largest, own_shares = _joined(measures, num_parts, parts, OWN_LARGEST, OWN_SUM)
        own_normalizer = tl.log(tl.sum(own_shares, 0).to(tl.float32)) + own_largest
        largest, shares, least = _share_sums(
            measures, limits, lines, line_stride, num_parts, row, parts
        )
        whole = tl.sum(shares, 0)
        is_greedy = _integer(lines, line_stride, row, IS_GREEDY_LINE) > 0
        point = whole * _uniform(lines, line_stride, row)
        ends = tl.cumsum(shares, 0)
        # Rounding may lead past the end; a part without a share is never chosen.
        last_part = tl.max(tl.where(shares > 0.0, parts, 0), 0)
        part = tl.min(tl.where((ends > point) & (shares > 0.0), parts, last_part), 0)
        if is_greedy:
            sources = measures + LARGEST * num_parts + parts
            of_parts = tl.load(sources, mask=parts < num_parts, other=float("-inf"))
            part = tl.min(tl.where(of_parts == largest, parts, PARTS_WIDTH - 1), 0)
        offset = point - tl.sum(tl.where(parts == part, ends - shares, 0.0), 0)
        ids = part * CHUNK + tl.arange(0, CHUNK)
        source = logits, lines, never, line_stride, logits_stride, vocab_size
        scores = _read_scores(source, row, ids, NUM_NEVER)
        weights = _weights(scores, largest)
        weights = tl.where(weights >= least, weights, 0.0)
        is_weighty = weights > 0.0
        last_id = tl.max(tl.where(is_weighty, ids, 0), 0)
        is_past = tl.cumsum(weights.to(tl.float64), 0) > offset
        token = tl.min(tl.where(is_past & is_weighty, ids, last_id), 0)
        if is_greedy:
            token = tl.min(tl.where(scores == largest, ids, NO_TOKEN), 0)
        token = tl.minimum(token, vocab_size - 1)
        logprob = tl.sum(tl.where(ids == token, scores, 0.0), 0)
        if IS_PROCESSED:
            logprob -= tl.log(whole.to(tl.float32)) + largest
        else:
            logprob -= own_normalizer
        is_valid = tl.abs(own_normalizer) < float("inf")
        is_possible = (whole > 0.0) & (whole < float("inf"))
        results += row * NUM_RESULTS
        tl.store(results + TOKEN, token.to(tl.float64))
        tl.store(results + LOGPROB, logprob.to(tl.float64))
        tl.store(results + IS_VALID, is_valid.to(tl.float64))
        tl.store(results + IS_POSSIBLE, is_possible.to(tl.float64))
        if _is_truncated(lines, line_stride, row):
            limits += row * NUM_LIMITS
            tl.store(results + RESULT_LOG_MASS, tl.load(limits + LOG_MASS).to(tl.float64))
            tl.store(results + RESULT_NUM_KEPT, tl.load(limits + NUM_KEPT).to(tl.float64))
        length = _integer(lines, line_stride, row, LENGTH_LINE)
        index = _integer(lines, line_stride, row, INDEX_LINE)
        tl.store(lines + TOKEN_LINE * line_stride + row, token.to(tl.int64))
        tl.store(lines + LENGTH_LINE * line_stride + row, length + 1)
        tl.store(lines + INDEX_LINE * line_stride + row, index + 1)
