"""Draw the three concepts of `docs/index.md` as SVG in `docs/pictures/`.

python scripts/pages/pictures.py [--folder FOLDER]

Each picture has a background of its own, so it can be read on a light and on a dark page; its
colours follow the reader's colour scheme.
"""

import argparse
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH = 650

STYLE = """
  svg { --back: #ffffff; --text: #1f2328; --faint: #59636e; --line: #8c959f; --wait: #e4e8ed;
    --a: #9ecbff; --b: #ffd8a8; --c: #b7e4c7; --d: #e5c7f2; }
  @media (prefers-color-scheme: dark) {
    svg { --back: #161b22; --text: #e6edf3; --faint: #9da7b3; --line: #6e7681; --wait: #3d444d;
      --a: #1f4f86; --b: #7a4a12; --c: #1f5c38; --d: #5b3470; }
  }
  text { font: 15px system-ui, sans-serif; fill: var(--text); }
  .title { font-weight: 600; font-size: 17px; }
  .faint { fill: var(--faint); }
  .middle { text-anchor: middle; }
  .back { fill: var(--back); }
  .box { stroke: var(--back); stroke-width: 2; }
  .a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); }
  .wait { fill: var(--wait); }
  .line { stroke: var(--line); stroke-width: 1.5; fill: none; }
"""

PROMPT = "a"
COMPLETION = "b"
OTHER_COMPLETION = "c"
LOSS = "d"
WAIT = "wait"


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Return a line of text whose baseline begins, or is centred, at a point."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a filled rectangle."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="3" class="box {style}"/>'


def labelled_box(x: float, y: float, width: float, height: float, style: str, words: str) -> str:
    """Return a rectangle with words in its middle."""
    label = text(x + width / 2, y + height / 2 + 5, words, "middle")
    return box(x, y, width, height, style) + label


def line(*points: tuple[float, float]) -> str:
    """Return a line through points."""
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{places}" class="line"/>'


def drawing(title: str, height: int, shapes: Sequence[str]) -> str:
    """Return a whole SVG document."""
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
    )
    background = f'<rect width="{WIDTH}" height="{height}" rx="8" class="back"/>'
    head = [opening, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", background]
    return "\n".join([*head, *shapes, "</svg>", ""])


def legend(y: float, entries: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a row of coloured squares with their meanings."""
    x = 24.0
    for style, words in entries:
        yield box(x, y - 13, 16, 16, style)
        yield text(x + 22, y, words, "faint")
        x += 22 + 8.2 * len(words) + 24


# Lengths of eight completions; both paths sample the same.
LENGTHS = (9, 4, 5, 12, 3, 7, 4, 6)
# Units of time of the loss, as drawn: the picture is not to scale.
PADDED_LOSS = 9
PACKED_LOSS = 4


def rows_of_continuous_batching(lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Return the lengths that each row runs, one after the other, if a free row takes the next."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for length in lengths:
        min(rows, key=sum).append(length)
    return rows


def step() -> str:
    """Draw the timeline of a training step with and without cb_rollout."""
    unit, row_height, left, num_rows = 21, 22, 24, 4
    shapes = [text(left, 34, "TRL alone", "title")]
    start, top = float(left), 48
    for first in range(0, len(LENGTHS), num_rows):
        batch = LENGTHS[first : first + num_rows]
        for row, length in enumerate(batch):
            y = top + row * row_height
            shapes.append(box(start, y, max(batch) * unit, row_height, WAIT))
            shapes.append(box(start, y, length * unit, row_height, COMPLETION))
        start += max(batch) * unit
    height = num_rows * row_height
    shapes.append(labelled_box(start, top, PADDED_LOSS * unit, height, LOSS, "loss, padded"))

    top = 190
    shapes.append(text(left, top - 14, "With cb_rollout", "title"))
    rows = rows_of_continuous_batching(LENGTHS, num_rows)
    for row, lengths in enumerate(rows):
        start = float(left)
        for length in lengths:
            shapes.append(box(start, top + row * row_height, length * unit, row_height, COMPLETION))
            start += length * unit
    start = left + max(map(sum, rows)) * unit
    shapes.append(labelled_box(start, top, PACKED_LOSS * unit, height, LOSS, "packed"))
    shapes.append(text(start + PACKED_LOSS * unit / 2, top + height / 2 + 22, "loss", "middle"))
    start += PACKED_LOSS * unit
    shapes.append(text(start + 16, top + height / 2 + 5, "the next step begins here", "faint"))
    shapes.append(text(left, top + height + 30, "time, not to scale", "faint"))
    entries = [(COMPLETION, "one completion"), (WAIT, "waiting for the longest"), (LOSS, "loss")]
    shapes += legend(top + height + 62, entries)
    return drawing("A training step with and without cb_rollout", top + height + 82, shapes)


def cache() -> str:
    """Draw the blocks of a paged cache that a group of completions shares."""
    size, left, table = 46, 24, 136
    shapes = [
        text(left, 34, "Three completions of one prompt, and the blocks of the cache", "title")
    ]
    blocks = ["P1", "P2", "P3 A1", "A2", "P3 B1", "P3 C1", "C2", "C3", "", ""]
    styles = [PROMPT, PROMPT, COMPLETION, COMPLETION]
    styles += [OTHER_COMPLETION, LOSS, LOSS, LOSS, WAIT, WAIT]
    tables = {"A": [0, 1, 2, 3], "B": [0, 1, 4], "C": [0, 1, 5, 6, 7]}
    cell, top = 28, 66
    for row, (name, numbers) in enumerate(tables.items()):
        y = top + row * 44
        shapes.append(text(left, y + 20, f"completion {name}"))
        for column, number in enumerate(numbers):
            x = table + column * cell
            shapes.append(labelled_box(x, y, cell, cell, styles[number], str(number)))
    shapes.append(text(table, top + 3 * 44 + 12, "block tables", "faint"))
    pool_left, columns, wide = 304, 5, 65
    for number, (words, style) in enumerate(zip(blocks, styles, strict=True)):
        x = pool_left + number % columns * wide
        y = top + number // columns * 76
        shapes.append(labelled_box(x, y, wide, size, style, words or "free"))
        shapes.append(text(x + wide / 2, y + size + 16, str(number), "faint middle"))
    shapes.append(
        text(pool_left, top + 166, "blocks: the keys and values of a few tokens", "faint")
    )
    first = "P1 and P2 are computed once and shared. The prompt's last block is not full,"
    second = "so each completion continues in a copy of it."
    shapes.append(text(left, top + 200, first))
    shapes.append(text(left, top + 222, second))
    return drawing("The paged cache and a group that shares its prompt", top + 244, shapes)


PROMPT_TOKENS = 8
# Tokens of each branch; the last two rows share the first two tokens of their completions.
BRANCHES = ((0, 5), (0, 3), (2, 4), (2, 2))


def tree() -> str:
    """Draw rows of a loss, padded and as a prefix tree, with the tokens of each."""
    unit, height, left = 24, 26, 90
    width = PROMPT_TOKENS + max(shared + own for shared, own in BRANCHES)
    num_padded = width * len(BRANCHES)
    shapes = [text(24, 34, f"Padded: {num_padded} tokens computed", "title")]
    styles = (COMPLETION, OTHER_COMPLETION, LOSS, LOSS)
    y = 50.0
    for number, (shared, own) in enumerate(BRANCHES):
        shapes.append(text(24, y + 18, f"row {number + 1}", "faint"))
        shapes.append(box(left, y, width * unit, height, WAIT))
        shapes.append(box(left, y, PROMPT_TOKENS * unit, height, PROMPT))
        x = left + PROMPT_TOKENS * unit
        shapes.append(box(x, y, (shared + own) * unit, height, styles[number]))
        y += height + 4

    num_shared = max(shared for shared, _ in BRANCHES)
    num_computed = PROMPT_TOKENS + num_shared + sum(own for _, own in BRANCHES)
    y += 44
    shapes.append(text(24, y - 12, f"As a tree: {num_computed} tokens computed", "title"))
    middle = y + 1.5 * (height + 14)
    end = left + PROMPT_TOKENS * unit
    shapes.append(labelled_box(left, middle, PROMPT_TOKENS * unit, height, PROMPT, "prompt, once"))
    fork_y = y + 2.5 * (height + 14)
    fork_x = end + 40
    for number, (shared, own) in enumerate(BRANCHES):
        branch_y = y + number * (height + 14)
        x = fork_x + (num_shared * unit + 40 if shared else 0)
        begin = (fork_x + num_shared * unit, fork_y) if shared else (end, middle)
        shapes.append(line((begin[0], begin[1] + height / 2), (x, branch_y + height / 2)))
        shapes.append(
            labelled_box(x, branch_y, own * unit, height, styles[number], str(number + 1))
        )
    shapes.append(line((end, middle + height / 2), (fork_x, fork_y + height / 2)))
    shapes.append(box(fork_x, fork_y, num_shared * unit, height, LOSS))
    y += len(BRANCHES) * (height + 14) + 22
    entries = [(PROMPT, "prompt"), (COMPLETION, "row 1"), (OTHER_COMPLETION, "row 2")]
    entries += [(LOSS, "rows 3 and 4"), (WAIT, "padding")]
    shapes += legend(y, entries)
    return drawing("The rows of a loss, padded and as a prefix tree", int(y) + 22, shapes)


DRAWN = {"step": step, "cache": cache, "tree": tree}


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description="Draw the concepts of the home page as SVG.")
    parser.add_argument("--folder", type=Path, default=PICTURES, help="where to write")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        path = folder / f"{name}.svg"
        path.write_text(draw())
        print(f"written to {path}")


if __name__ == "__main__":
    main()
