"""Whether the packages that a command works with are installed, asked before it begins."""

import importlib.util
from collections.abc import Iterable

from cb_rollout.errors import ConfigurationError


def require(command: str, packages: Iterable[str], requirement: str) -> None:
    """Refuse a command whose packages are missing.

    Args:
        command: what was asked for.
        packages: the names that it imports; they are looked for and not loaded.
        requirement: what `pip install` brings them with.

    Raises:
        ConfigurationError: some are missing; it names them and the requirement.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"{command} needs {', '.join(missing)}, not installed here: pip install {requirement}"
        )
