#!/usr/bin/env bash
# Run everything that needs one CUDA device, in under eight minutes: the tests marked `gpu`, the
# kernels' tests compiled for the device, and a bench on GPU shapes. Needs no network and no install,
# but torch >= 2.11, triton, transformers >= 5.17, accelerate, peft, psutil, pytest and hypothesis;
# packages that a machine lacks may be in a folder named by PYTHONPATH.
#
#     bash scripts/gpu_check.sh [FOLDER FOR THE RESULTS]
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
results=${1:-runs/gpu}
mkdir -p "$results"
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# Most of the tests' time is compiling kernels.
workers=$("$python" -c "import xdist; print('-n 8')" 2>/dev/null || true)

# Without pyproject.toml, which asks for a newer pytest than a machine without network may have.
timeout 190 "$python" -m pytest -c /dev/null --rootdir . --import-mode=importlib \
  -p no:cacheprovider -q --durations=5 $workers \
  tests/engine/attention/test_triton_kernels.py tests/gpu 2>&1 | tee "$results/tests.txt"
tests=$?

timeout 270 "$python" scripts/gpu_bench.py --seconds 220 --output "$results/gpu.json" 2>&1 |
  tee "$results/bench.txt"
bench=$?

echo "tests: $([ $tests = 0 ] && echo passed || echo "FAILED, see $results/tests.txt")"
echo "bench: $([ $bench = 0 ] && echo "$results/gpu.json" || echo "FAILED, see $results/bench.txt")"
exit $((tests != 0 || bench != 0))
