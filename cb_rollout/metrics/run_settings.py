"""Write and read a run's settings, versions and machine, by section.

Owns one file of a run's directory, with a JSON line for each run. Whoever records the run chooses
the settings. Loads no torch.
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

from cb_rollout import __version__
from cb_rollout.metrics.jsonl import append_lines, json_line, read_records, remove_half_line

SETTINGS_FILE = "settings.jsonl"

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed")

# A longer value is cut, because people read the page of settings.
MAX_CHARACTERS = 200

# Parts of the names of settings whose values are secrets.
SECRET_NAMES = ("token", "api_key", "secret", "password", "authorization", "cookie")
# Endings of names that contain "token" but hold counts or ids, not secrets.
COUNT_ENDINGS = ("_tokens", "_tokens_seen", "_token_ids", "_token_budget")

Sections = Mapping[str, Mapping[str, Any]]
"""Values by section title, and then by the name of a setting."""


def changed_settings(settings: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not at their defaults, without secrets."""
    changed: dict[str, Any] = {}
    for field in fields(settings):
        default: Any = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        value = getattr(settings, field.name, None)
        is_own = field.name.startswith("_")
        if is_own or is_secret(field.name) or value is default:
            continue
        if default is MISSING or _text(value) != _text(default):
            changed[field.name] = value
    return changed


def is_secret(name: str) -> bool:
    """Return whether a setting of this name may be a secret."""
    lowered = name.lower()
    if lowered.endswith(COUNT_ENDINGS):
        return False
    return any(part in lowered for part in SECRET_NAMES)


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the packages that training uses."""
    found = {"python": platform.python_version(), "cb_rollout": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_settings(run_dir: str | os.PathLike[str], run_id: str, sections: Sections) -> None:
    """Append a run's settings, or raise `OSError`."""
    texts: dict[str, dict[str, str]] = {}
    for title, settings in sections.items():
        texts[title] = {name: _text(value) for name, value in settings.items()}
    path = Path(run_dir) / SETTINGS_FILE
    remove_half_line(path)
    with path.open("ab", buffering=0) as file:
        append_lines(file, json_line({"run_id": run_id, "sections": texts}))


def read_settings(run_dir: str | os.PathLike[str], run_id: str) -> dict[str, dict[str, str]]:
    """Return a run's settings as text, by section; empty: they were not recorded.

    Raises:
        ConfigurationError: a line of the file cannot be read.
    """
    found: dict[str, dict[str, str]] = {}
    for recorded_id, sections in _rows(Path(run_dir) / SETTINGS_FILE):
        if recorded_id == run_id:
            found = sections
    return found


def _rows(path: Path) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
    def parse(row: Any) -> tuple[str, dict[str, dict[str, str]]]:
        sections: dict[str, dict[str, str]] = {}
        for title, settings in row["sections"].items():
            sections[title] = {name: str(value) for name, value in settings.items()}
        return str(row["run_id"]), sections

    return read_records(path, parse, "run's settings")


def _text(value: Any) -> str:
    """Return a value as text without memory addresses; a long text is cut."""
    if isinstance(value, Enum):
        text = str(value.value)
    elif isinstance(value, str):
        text = str(value)
    elif isinstance(value, list | tuple | set | frozenset):
        text = f"[{', '.join(_texts(value))}]"
    elif isinstance(value, dict):
        # A dict may hold secrets under its keys, such as the headers of a server.
        text = ", ".join(f"{name}={_text(v)}" for name, v in value.items() if not _hides(name))
        text = f"{{{text}}}"
    elif isinstance(value, int | float | None):
        text = repr(value)
    elif callable(value):
        text = getattr(value, "__name__", type(value).__name__)
    else:
        text = type(value).__name__
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def _texts(values: Iterable[Any]) -> list[str]:
    return [_text(value) for value in values]


def _hides(name: Any) -> bool:
    return is_secret(str(name))
