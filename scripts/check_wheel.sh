#!/usr/bin/env bash
# Builds the source archive, and the wheel from it, into dist/. Then installs the wheel into a bare
# environment of each Python and tries it there: the commands, a training, the demo.
#   scripts/check_wheel.sh [PYTHON...]     # python3.11, or paths of several
# Prints the seconds of each step and the megabytes of each installation.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
pythons=("${@:-python3.11}")
torch=$(grep -x 'torch==.*' "$root/constraints.txt")
# Packages of the development environment that nobody who trains needs.
unwanted='deepspeed|bitsandbytes|ray|nodejs.*|fastapi|pytest|gguf'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HUB_OFFLINE=1 WANDB_MODE=offline PIP_DISABLE_PIP_VERSION_CHECK=1
# The checkout must not be found in place of the wheel.
unset PYTHONPATH

step() {
    local name=$1 begun=$SECONDS
    shift
    if ! "$@" >"$work/log" 2>&1; then
        tail -n 40 "$work/log"
        echo "failed: $name" >&2
        exit 1
    fi
    printf '%-46s %5d s' "$name" $((SECONDS - begun))
}

megabytes() { printf ' %6d MB' "$(du -sm "$1" | cut -f 1)"; }

leaves_out() { ! "$1/bin/pip" list --format freeze | grep -iE "^($unwanted)=="; }

try_wheel() {
    local python=$1 environment=$2 bin=$2/bin
    step "$("$python" --version): bare environment" "$python" -m venv "$environment"
    # Alone and first: an index that has a CPU build of the pinned version then gives that one.
    step $'\n'"  pip install $torch" "$bin/pip" install "$torch"
    megabytes "$environment"
    step $'\n'"  pip install the wheel" "$bin/pip" install "$root"/dist/*.whl
    megabytes "$environment"
    step $'\n'"  pip check" "$bin/pip" check
    step $'\n'"  installs no development package" leaves_out "$environment"
    step $'\n'"  import cb_rollout" "$bin/python" -c "import cb_rollout"
    step $'\n'"  cb-rollout env --json" "$bin/cb-rollout" env --json
    step $'\n'"  cb-rollout doctor" "$bin/cb-rollout" doctor
    step $'\n'"  a training, attached" "$bin/python" "$root/tests/attach_once.py"
    step $'\n'"  cb-rollout demo" "$bin/cb-rollout" demo
    step $'\n'"  pip uninstall wandb" "$bin/pip" uninstall --yes wandb
    step $'\n'"  a training, attached, without wandb" "$bin/python" "$root/tests/attach_once.py"
    echo
}

rm -rf "$root/dist"
step "tools" "${pythons[0]}" -m venv "$work/tools"
step $'\n'"pip install build twine" "$work/tools/bin/pip" install build==1.6.1 twine==7.0.0
step $'\n'"build" "$work/tools/bin/python" -m build --outdir "$root/dist" "$root"
step $'\n'"twine check" "$work/tools/bin/twine" check --strict "$root"/dist/*
echo
(cd "$root/dist" && du -k ./*)

# No checkout stands beside what runs.
mkdir "$work/empty"
cd "$work/empty"
for python in "${pythons[@]}"; do
    try_wheel "$python" "$work/environment"
    rm -rf "$work/environment"
done
