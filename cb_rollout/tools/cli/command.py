"""Exit codes, options, checks and messages that the commands share."""

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args, get_type_hints

from cb_rollout.config import checks
from cb_rollout.config.nearest import hint, nearest_names
from cb_rollout.config.rollout import SYNONYMS
from cb_rollout.errors import ConfigurationError, RolloutError
from cb_rollout.metrics.run_records import json_value
from cb_rollout.metrics.write_faults import write_advice

# The command ran and reports a problem.
EXIT_PARTLY = 1

# The command could not run. argparse uses the same code for wrong options.
EXIT_FAULT = 2

# Matches a setting in an error's message, with a value that is quoted text or True. Other values,
# such as numbers, stay as they are.
SETTING = re.compile(
    r"""
    (?<![\w.'/-]) (?P<name>[a-z]\w*) (?![\w/])        # a whole word, which is no part of a path
    (?: (?P<equals>=) (?P<value>'[^'\s]+'|True\b)? )? # perhaps "=", and quoted text or True
    """,
    re.VERBOSE,
)

# The code that a shell reports for a process ended by Ctrl-C.
EXIT_INTERRUPTED = 130


def whole_number(text: str) -> int:
    """Parse an option's whole number, or explain why it is not one."""
    try:
        return checks.whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def real_number(text: str) -> float:
    """Parse an option's finite number, or explain why it is not one."""
    try:
        return checks.real_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Read the value of an option that is a field of a dataclass, by the field's type.
READERS: dict[Any, Callable[[str], Any]] = {int: whole_number, float: real_number}


class Answer(NamedTuple):
    """Output of a command: its text, the JSON object that `--json` prints, and its exit code."""

    text: str
    value: Mapping[str, Any]
    exit_code: int = 0


class CommandParser(argparse.ArgumentParser):
    """Parser of a command that maps each setting to its option."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; exit on an unknown option.

        An unknown option is reported before a missing option, because it may be a misspelling of
        the missing option.
        """
        if args is None:
            args = sys.argv[1:]
        given = list(args)
        for text in given:
            if text == "--":
                break
            name = text.partition("=")[0]
            if name.startswith("--") and not self._is_option(name):
                self._refuse_option(name)
        return super().parse_known_args(given, namespace)

    def _is_option(self, name: str) -> bool:
        # argparse accepts the beginning of an option's name in place of the whole name.
        return any(option.startswith(name) for option in self._option_string_actions)

    def _refuse_option(self, name: str) -> NoReturn:
        known: list[str] = []
        for option in self._option_string_actions:
            if option.startswith("--"):
                known.append(option.removeprefix("--").replace("-", "_"))
        word = name.removeprefix("--").replace("-", "_")
        meant = nearest_names(word, known, self._options_of_settings(known))
        advice = f"see {self.prog} --help."
        if meant:
            advice = hint([f"--{setting.replace('_', '-')}" for setting in meant])
        _write_fault(f"{self.prog.partition(' ')[2]} has no option {name}; {advice}")
        self.exit(EXIT_FAULT)

    def _options_of_settings(self, known: Collection[str]) -> dict[str, str]:
        """Map other projects' names for a setting to its option, if the command has that option."""
        return {name: setting for name, setting in SYNONYMS.items() if setting in known}

    def set_run(self, run: Callable[[argparse.Namespace], int | Answer]) -> None:
        """Make `run` the command; its answer and its errors name settings by their options.

        A command that returns an exit code has printed its output itself.
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
                _write_fault(self.in_options(str(error)))
                return EXIT_FAULT
            except KeyboardInterrupt as interrupt:
                _write_fault(str(interrupt) or "interrupted.")
                return EXIT_INTERRUPTED

        self.set_defaults(run=checked)

    def in_options(self, text: str) -> str:
        """Name the settings of a message by their options: `seed=4` becomes `--seed 4`.

        A name that is a common word, such as "seed", is a setting only before "=".
        """
        flags = self._flags_by_setting()

        def option(match: re.Match[str]) -> str:
            name = match["name"]
            has_value = match["equals"] is not None
            is_setting = has_value or "_" in name
            if name not in flags or not is_setting:
                return match[0]
            flag = flags[name]
            if not has_value or match["value"] == "True":
                return flag
            quoted = match["value"] or ""
            return f"{flag} " + quoted.strip("'")

        return SETTING.sub(option, text)

    def _flags_by_setting(self) -> dict[str, str]:
        """Map the name of each setting, and its synonym in `RolloutConfig`, to its option."""
        flag_of: dict[str, str] = {}
        for action in self._actions:
            # `--no-progress-bar` sets progress_bar=False, so it is not another name of the setting.
            if action.option_strings and action.const is not False:
                flag_of[action.dest] = action.option_strings[0]
        synonyms: dict[str, str] = {}
        for name, flag in flag_of.items():
            if name in SYNONYMS:
                synonyms[SYNONYMS[name]] = flag
        # An option with the setting's own name takes precedence over the option of a synonym.
        return synonyms | flag_of


def _write_fault(text: str) -> None:
    """Write the reason why a command could not run to stderr, as one line."""
    one_line = " ".join(text.split())
    sys.stderr.write(f"cb-rollout: {one_line}\n")


def add_fields(
    parser: argparse.ArgumentParser,
    options: type[Any],
    notes: Mapping[str, str] | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Add an option for each field of a dataclass; its metadata has the help text, as "help".

    `notes` follow a field's help in place of its default. With `names`, only these fields get
    options, with their defaults; without `names`, options that are not given are left out of the
    result.
    """
    type_hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        if names is not None and field.name not in names:
            continue
        value_type = _type_besides_none(type_hints[field.name])
        if notes is not None and field.name in notes:
            note = notes[field.name]
        elif field.default is None or value_type is bool:
            note = ""
        else:
            note = f" ({field.default})"
        text = field.metadata["help"] + note
        action: dict[str, Any] = {"type": READERS.get(value_type, value_type)}
        if value_type is bool:
            action = {"action": "store_true"}
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS if names is None else field.default,
            help=text.replace("%", "%%"),
            **action,
        )


def _type_besides_none(hint: Any) -> Any:
    """Return the first type of `X | None` that is not None; any other hint unchanged."""
    for member in get_args(hint):
        if member is not type(None):
            return member
    return hint


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which the parsed arguments have as `is_json`."""
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
        raise ConfigurationError(
            f"{folder} cannot be {refused} ({error.strerror}). "
            f"{write_advice(error, folder, 'folder')}"
        ) from error
