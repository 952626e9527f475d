"""Writes what the documents take from code and measurements: configuration.md, the README's table.

python scripts/docs.py            # write
python scripts/docs.py --check    # fail if something would change
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

from cb_rollout.config import RolloutConfig

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"

CONFIGURATION_HEADER = """# Configuration

Every field of `RolloutConfig`, from its help text. A field that cannot be honoured raises
`ConfigurationError`; none is ignored. Written by `scripts/docs.py`.

| field | default | meaning |
|---|---|---|
"""

WORKLOADS = {
    "long_tailed_groups": "rollout, 16 prompts x 8 completions, long-tailed lengths",
    "equal_lengths": "rollout, 128 prompts, 64 tokens each",
    "grpo_step": "one GRPO step through TRL",
}


def configuration() -> str:
    """The configuration page."""
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |"
        for field in dataclasses.fields(RolloutConfig)
    ]
    return CONFIGURATION_HEADER + "\n".join(rows) + "\n"


def benchmark_table() -> str:
    """The README's table, from the recorded runs."""
    lines = ["| workload | contender | median | cb_rollout is |", "|---|---|---|---|"]
    for path in sorted(BENCHMARKS.glob("*.json")):
        record = json.loads(path.read_text())
        known = {w: c for w, c in record["results"].items() if w in WORKLOADS}
        if not known:
            continue
        for workload, contenders in known.items():
            ours = contenders["cb_rollout"]["median"]
            for name, figures in contenders.items():
                is_time = figures["unit"] == "seconds"
                ratio = figures["median"] / ours if is_time else ours / figures["median"]
                value = (
                    f"{figures['median']:.2f} s"
                    if is_time
                    else f"{figures['median']:,.0f} tokens/s"
                )
                said = "-" if name == "cb_rollout" else f"{ratio:.1f}x as fast"
                lines.append(f"| {WORKLOADS[workload]} | {name} | {value} | {said} |")
        versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
        device = f"{record['device']}, {record['threads']} threads"
        lines.append(f"| *{device}, {record['date']}, {versions}* | | | |")
    return "\n".join(lines) + "\n"


def readme(text: str) -> str:
    """The README with its table renewed."""
    return re.sub(
        r"(?<=<!-- benchmarks -->\n).*?(?=<!-- end of benchmarks -->)",
        lambda _: benchmark_table(),
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    """Write the documents, or only compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    readme_path = ROOT / "README.md"
    wanted = {
        ROOT / "docs" / "configuration.md": configuration(),
        readme_path: readme(readme_path.read_text()),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(wanted[path])
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
