#!/usr/bin/env bash
# Runs the tests on the oldest and the newest transformers and TRL that pyproject.toml allows, each in
# an environment of its own under .compat/. "oldest" or "newest" runs one of them; further arguments go
# to pytest: scripts/compat.sh oldest tests/training
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
base=${PYTHON:-python3.11}
export HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_NUM_THREADS=1 PYTHONPATH=$root
mkdir -p .compat
# What moves between the two; everything else is as constraints.txt says.
grep -vE '^(transformers|trl|tokenizers|huggingface_hub|safetensors)==' constraints.txt \
    >.compat/constraints.txt

# The requirements of pyproject.toml; "oldest": each at its lower bound, as 5.17 is for ">=5.17,<6".
_requirements() {
    "$base" - "$1" <<'PYTHON'
import re
import sys
import tomllib

dependencies = tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]
for one in dependencies:
    name, bounds = re.match(r"(\w+)(.*)", one).groups()
    if name in ("transformers", "trl"):
        lowest = re.search(r">=([\d.]+)", bounds)[1]
        print(f"{name}=={lowest}.*" if sys.argv[1] == "oldest" else one)
PYTHON
}

_run() {
    local name=$1 python=.compat/$1/bin/python
    shift
    [[ -x $python ]] || "$base" -m venv ".compat/$name" || return 1
    local pip=("$python" -m pip install --quiet --disable-pip-version-check -c .compat/constraints.txt)
    local wanted
    mapfile -t wanted < <(_requirements "$name")
    # Torch alone and first: an index that has a CPU build of the pinned version then gives that one.
    "${pip[@]}" torch && "${pip[@]}" --upgrade -e "$root[dev]" "${wanted[@]}" || return 1
    echo "$name: $("$python" -m pip list 2>/dev/null | grep -E '^(torch|transformers|trl) ' | xargs)"
    "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile -p no:cacheprovider "$@"
}

status=0
case ${1:-} in
    oldest | newest)
        names=("$1")
        shift
        ;;
    *) names=(oldest newest) ;;
esac
for name in "${names[@]}"; do
    _run "$name" "$@" || status=1
done
exit "$status"
