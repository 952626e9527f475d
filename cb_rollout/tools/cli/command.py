"""Exit codes, options, checks and messages that the commands share."""

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from cb_rollout.config import checks
from cb_rollout.config.rollout import SYNONYMS
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.metrics.run_records import json_value

# The command ran and reports a problem.
EXIT_PARTLY = 1

# The command could not run. argparse uses the same code for wrong options.
EXIT_FAULT = 2

# A setting in an error's message, with "=" and a quoted value where it has them; no part of a path.
QUOTE = "'"
SETTING = re.compile(r"(?<![\w.'/-])([a-z]\w*)(?![\w/])(?:(=)('[^'\s]+'|True\b)?)?")

# The code that a shell reports for a process ended by Ctrl-C.
EXIT_INTERRUPTED = 130


def whole_number(text: str) -> int:
    """Read an option's whole number, or say why it is none."""
    try:
        return checks.whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def real_number(text: str) -> float:
    """Read an option's finite number, or say why it is none."""
    try:
        return checks.real_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Of options that are fields of a dataclass, by the field's type.
READERS: dict[Any, Callable[[str], Any]] = {int: whole_number, float: real_number}


class Answer(NamedTuple):
    """Output of a command, as text and with `--json` as a JSON object, and its exit code."""

    text: str
    value: Mapping[str, Any]
    exit_code: int = 0


class CommandParser(argparse.ArgumentParser):
    """Parser of a command, which knows the option of each setting."""

    def set_run(self, run: Callable[[argparse.Namespace], int | Answer]) -> None:
        """Make `run` the command; in its answer and its errors settings are named by options.

        A command that returns an exit code has printed what it has to say.
        """

        def checked(arguments: argparse.Namespace) -> int:
            try:
                answer = run(arguments)
                if isinstance(answer, int):
                    return answer
                if arguments.is_json:
                    write_json(answer.value)
                else:
                    print(self.in_options(answer.text))
                return answer.exit_code
            except RolloutError as error:
                text, code = self.in_options(str(error)), EXIT_FAULT
            except KeyboardInterrupt as interrupt:
                text, code = str(interrupt) or "interrupted.", EXIT_INTERRUPTED
            sys.stderr.write(f"cb-rollout: {' '.join(text.split())}\n")
            return code

        self.set_defaults(run=checked)

    def in_options(self, text: str) -> str:
        """Name the settings of a message by their options: `seed=4` becomes `--seed 4`.

        A name that is a common word, such as "seed", is a setting only before "=".
        """
        # `--no-progress-bar` sets progress_bar=False, so it is no other name of the setting.
        actions = [x for x in self._actions if x.option_strings and x.const is not False]
        flags = {SYNONYMS.get(x.dest, x.dest): x.option_strings[0] for x in actions}
        flags |= {x.dest: x.option_strings[0] for x in actions}

        def option(match: re.Match[str]) -> str:
            name, equals, value = match.groups()
            if name not in flags or not (equals or "_" in name):
                return match[0]
            has_value = equals and value != "True"
            return f"{flags[name]} {(value or '').strip(QUOTE)}" if has_value else flags[name]

        return SETTING.sub(option, text)


def add_fields(
    parser: argparse.ArgumentParser,
    options: type[Any],
    notes: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Add an option for each field of a dataclass whose metadata has its "help".

    `notes` follow a field's help in place of its default. With `names`, only these fields get
    options, with their defaults; else options that are not given are left out of the result.
    """
    kinds = get_type_hints(options)
    for field in dataclasses.fields(options):
        if names is not None and field.name not in names:
            continue
        kind = kinds[field.name]
        kind = next((k for k in get_args(kind) if k is not type(None)), kind)
        note = "" if field.default is None or kind is bool else f" ({field.default})"
        text = field.metadata["help"] + (notes or {}).get(field.name, note)
        action: dict[str, Any] = {"type": READERS.get(kind, kind)}
        if kind is bool:
            action = {"action": "store_true"}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS if names is None else field.default,
            help=text.replace("%", "%%"),
            **action,
        )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which is `is_json` of the parsed arguments."""
    text = "print one JSON object instead of text"
    parser.add_argument("--json", dest="is_json", action="store_true", default=False, help=text)


def write_json(value: Any) -> None:
    """Write a value to stdout as JSON; a number that is not finite becomes null."""
    print(json.dumps(json_value(value), indent=2, allow_nan=False))


def require_packages(command: str, packages: Iterable[str], requirement: str) -> None:
    """Raise `ConfigurationError` for missing packages, which `pip install requirement` installs."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{command} needs {', '.join(missing)}, not installed here: pip install {requirement}"
        )


def require_writable(folder: Path) -> None:
    """Create a folder if it is missing; ConfigurationError: no file can be created in it."""
    refused = "made"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refused = "written to"
        # Permission bits are not enough: the file system may be read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be {refused} ({error.strerror}).") from error
