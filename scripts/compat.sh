#!/usr/bin/env bash
# Runs tests on the oldest versions that pyproject.toml allows, and on the newest that an install
# without pins brings, each in an environment of its own under .compat/:
#
#     bash scripts/compat.sh                   # both
#     bash scripts/compat.sh oldest            # torch 2.11, triton 3.6, transformers 5.17, trl 1.16
#     bash scripts/compat.sh newest tests      # further arguments go to pytest
#     bash scripts/compat.sh --pins            # print the constraints of "oldest"
#
# Without arguments for pytest, the tests below run. PYTHON: the Python to use (python3.11).
# CONTRIBUTING.md says what an environment downloads.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root" || exit 1
base=${PYTHON:-python3.11}
export HF_HUB_OFFLINE=1 WANDB_MODE=offline OMP_NUM_THREADS=1 PYTHONPATH=$root

# Kernels, captured precisions, fast path, graphs and packed loss.
tests=(
    tests/engine/attention
    tests/engine/cuda_graphs
    tests/invariants/test_captured_precisions.py
    tests/invariants/test_fast_path.py
    tests/invariants/test_pretended_device.py
    tests/invariants/test_proof.py
    tests/invariants/test_recurrent_graphs.py
    tests/packing
    tests/training/test_pretended_device.py
)

# What moves with torch, transformers and trl; everything else is as constraints.txt says.
moving='torch|triton|numpy|transformers|trl|tokenizers|huggingface_hub|safetensors'

# Each requirement of pyproject.toml at its lower bound, as 5.17 is for ">=5.17,<6".
_lowest() {
    "$base" - <<'PYTHON'
import re
import tomllib

for one in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    name, bounds = re.match(r"(\w+)(.*)", one).groups()
    lowest = re.search(r">=([\d.]+)", bounds)
    if lowest is not None:
        print(f"{name}=={lowest[1]}.*")
PYTHON
}

_constraints() {
    if [[ $1 == newest ]]; then return; fi
    grep -vE "^($moving)==" constraints.txt
    _lowest
    # torch 2.11 requires triton 3.6, whose interpreter fails with numpy 2.4.
    printf '%s\n' 'triton==3.6.*' 'numpy<2.4'
}

_run() {
    local name=$1 python=.compat/$1/bin/python pip
    shift
    mkdir -p .compat
    _constraints "$name" >".compat/$name.txt" || return 1
    [[ -x $python ]] || "$base" -m venv ".compat/$name" || return 1
    pip=("$python" -m pip install --quiet --disable-pip-version-check --upgrade -c ".compat/$name.txt")
    # Torch alone and first: an index that has a CPU build of that version then gives that one.
    "${pip[@]}" torch && "${pip[@]}" -e "$root[dev]" || return 1
    echo "$name: $("$python" -m pip list 2>/dev/null |
        grep -E '^(torch|triton|numpy|transformers|trl) ' | xargs)"
    "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile -p no:cacheprovider "$@"
}

case ${1:-} in
    --pins)
        _constraints oldest
        exit
        ;;
    oldest | newest)
        names=("$1")
        shift
        ;;
    *) names=(oldest newest) ;;
esac
if (($# == 0)); then set -- "${tests[@]}"; fi
status=0
for name in "${names[@]}"; do
    _run "$name" "$@" || status=1
done
exit "$status"
