"""Four thousand rows, killed three times at random: each there once, as if never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import char_tokenizer, tiny_model

NUM_ROWS, NUM_KILLS = 4_000, 3
TIMEOUT_SECONDS = 600
# A run that hangs fails the test.

MAX_GROWTH_BYTES = 32 * 1024**2
# Of a run's memory from its first quarter to its end; all rows and results together are more.

MAX_ROUNDING_DIFFERENCES = NUM_ROWS // 1000
# Sequences in which a draw fell between two roundings of one forward, in batches of other shapes.

MEMORY_SCORER = """
import psutil
process, calls, sizes = psutil.Process(), 0, open("sizes.txt", "a", buffering=1)
def memory(row):
    global calls
    calls += 1
    if calls % 100 == 0:
        print(process.memory_info().rss, file=sizes)
    return len(row["token_ids"])
"""


def command(checkpoint, rows, output):
    return [
        *(sys.executable, "-m", "cb_rollout", "generate", "--model", str(checkpoint)),
        *("--input", str(rows), "--output", str(output), "--max-new-tokens", "8", "--seed", "7"),
        *("--temperature", "1", "--max-num-seqs", "128", "--evaluate", "scorer:memory"),
        "--no-progress-bar",
    ]


def results(output):
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    return {line["id"]: line["token_ids"] for line in lines}, len(lines)


@pytest.mark.slow
def test_killed_three_times_each_row_is_there_once_and_as_if_never_killed(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(checkpoint)
    tiny_model(vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(checkpoint)
    (tmp_path / "scorer.py").write_text(MEMORY_SCORER)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{n} + {n} ="}}\n' for n in range(NUM_ROWS)))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    settings = {"cwd": tmp_path, "env": environment, "stdout": subprocess.DEVNULL}

    whole = tmp_path / "whole.jsonl"
    subprocess.run(
        command(checkpoint, rows, whole), check=True, timeout=TIMEOUT_SECONDS, **settings
    )
    sizes = [int(line) for line in (tmp_path / "sizes.txt").read_text().split()]
    assert len(sizes) == NUM_ROWS // 100
    assert sizes[-1] - sizes[len(sizes) // 4] < MAX_GROWTH_BYTES

    killed = tmp_path / "killed.jsonl"
    rng = random.Random(0)
    for _ in range(NUM_KILLS):
        size = killed.stat().st_size if killed.exists() else 0
        until = size + rng.randrange(1, whole.stat().st_size // (NUM_KILLS + 1))
        process = subprocess.Popen(command(checkpoint, rows, killed), **settings)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not killed.exists() or killed.stat().st_size < until:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert len(killed.read_text().splitlines()) < NUM_ROWS
    subprocess.run(
        command(checkpoint, rows, killed), check=True, timeout=TIMEOUT_SECONDS, **settings
    )

    expected, num_expected = results(whole)
    found, num_found = results(killed)
    assert num_expected == num_found == NUM_ROWS
    assert set(expected) == set(found) == set(range(NUM_ROWS))
    differing = [row for row in expected if expected[row] != found[row]]
    assert len(differing) <= MAX_ROUNDING_DIFFERENCES
    print(f"{len(differing)} of {NUM_ROWS} sequences differ, by rounding")  # noqa: T201
