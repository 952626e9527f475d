"""The frame of every page: its head, its style, and what a browser may load."""

import os
from importlib.resources import files

from cb_rollout.errors import ConfigurationError
from cb_rollout.tools.report.tokens import visible_html

# What a browser may load: what is inside the page alone.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def unusable(run_dir: str | os.PathLike[str], error: OSError) -> ConfigurationError:
    """Return the error of a file of a run that cannot be read, or of its page."""
    # A page that cannot be replaced is the second file.
    path = error.filename2 or error.filename or run_dir
    return ConfigurationError(
        f"{path} cannot be read or written ({error.strerror}); look at what it is and who may use "
        "it."
    )


def html_page(name: str, content: str) -> str:
    """Return a self-contained page around its content."""
    style = files("cb_rollout.tools.report").joinpath("report.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{visible_html(name)} &middot; rollout report</title>
<style>
{style}</style>
</head>
<body>
<main>
{content}
</main>
</body>
</html>
"""
