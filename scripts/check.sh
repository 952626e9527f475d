#!/usr/bin/env bash
# Runs every static check and builds the documentation site, then says which failed.
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
# The pinned pyright is wanted, not news of a later one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS=1

failed=()
check() {
    echo "== $*"
    "$root/.venv/bin/$1" "${@:2}" || failed+=("$*")
}

check ruff check
check ruff format --check
check lint-imports --no-logo
check pyright
check codespell

echo "== scripts/docs.sh"
bash scripts/docs.sh || failed+=("scripts/docs.sh")

if ((${#failed[@]})); then
    printf 'failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "all checks passed"
