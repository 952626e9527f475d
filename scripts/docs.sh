#!/usr/bin/env bash
# Builds the documentation site into build/site, offline; a warning fails it. Arguments go to mkdocs.
# The generated parts of the pages are written by scripts/write_docs.py.
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
# The theme advertises the next major version of MkDocs on each build.
export NO_MKDOCS_2_WARNING=true
"$python" -m mkdocs build --strict --clean "$@"
echo "written to build/site/index.html"
