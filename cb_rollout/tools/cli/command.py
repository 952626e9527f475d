"""Exit codes, options and checks that the commands share."""

import argparse
import dataclasses
import importlib.util
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from cb_rollout.errors import ConfigurationError

# The command ran and reports a problem.
EXIT_PARTLY = 1

# The command could not run. argparse uses the same code for wrong options.
EXIT_FAULT = 2

# The code that a shell reports for a process ended by Ctrl-C.
EXIT_INTERRUPTED = 130


def add_fields(
    parser: argparse.ArgumentParser, options: type[Any], notes: Mapping[str, str] | None = None
) -> None:
    """Add an option for each field of a dataclass; options not given are left out of the result.

    Args:
        parser: the parser to extend.
        options: a dataclass whose fields have a "help" entry in their metadata.
        notes: text that follows a field's help, in place of its default.
    """
    kinds = get_type_hints(options)
    for field in dataclasses.fields(options):
        kind = kinds[field.name]
        kind = next((k for k in get_args(kind) if k is not type(None)), kind)
        note = "" if field.default is None or kind is bool else f" ({field.default})"
        text = field.metadata["help"] + (notes or {}).get(field.name, note)
        action: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **action,
        )


def require_packages(command: str, packages: Iterable[str], requirement: str) -> None:
    """Refuse a command whose packages are not installed; loads none of them.

    Args:
        command: the command, as the message names it.
        packages: the modules that it imports.
        requirement: the argument of `pip install` that installs them.

    Raises:
        ConfigurationError: a package is missing; the message names it and the requirement.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{command} needs {', '.join(missing)}, not installed here: pip install {requirement}"
        )


def require_writable(folder: Path) -> None:
    """Create a folder if it is missing, and check that files can be created in it.

    Raises:
        ConfigurationError: the folder cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be made ({error.strerror}).") from error
    try:
        # Permission bits are not enough: the file system may be read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written to ({error.strerror}).") from error
