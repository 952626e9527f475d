#!/usr/bin/env bash
# Run what needs one CUDA device, most telling first: rollouts beside peers (vLLM too, where
# CB_ROLLOUT_VLLM_PYTHON names its Python), the kernels' tests compiled for the device, the tests
# marked `gpu`, stages of the attention kernel, decode steps. Ends within eight minutes, and names
# the parts that it did not reach. Needs no network.
#
#     bash scripts/gpu_check.sh [FOLDER FOR THE RESULTS]
#
# PYTHON: the Python to run (python3). GPU_CHECK_SECONDS: the time for all parts (460).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
results=${1:-runs/gpu}
seconds=${GPU_CHECK_SECONDS:-460}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

needs=(torch transformers triton accelerate peft psutil pytest hypothesis)
missing=$("$python" - "${needs[@]}" <<'END'
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name} ({type(error).__name__}: {error})".splitlines()[0])
if "torch" in sys.modules and not sys.modules["torch"].cuda.is_available():
    print("a CUDA device: torch sees none")
END
) || missing="a Python that starts: PYTHON=$python does not"
if [ -n "$missing" ]; then
  echo "gpu_check needs what $python lacks:"
  echo "$missing"
  echo "Install the packages there (pip install ${needs[*]}). Without network: on another machine"
  echo "  pip install --no-deps --target FOLDER NAMES, copy FOLDER, and set PYTHONPATH=FOLDER."
  exit 2
fi

mkdir -p "$results"
summary=()
failed=0

# run NAME LIMIT COMMAND...: run one part, for LIMIT seconds or what is left of the time.
run() {
  local name=$1 limit=$2 left=$((seconds - SECONDS)) status
  shift 2
  if [ "$left" -lt 2 ]; then
    summary+=("$name: not reached")
    failed=1
    return
  fi
  echo "== $name"
  timeout --kill-after=5 "$((left < limit ? left : limit))" "$@" 2>&1 | tee "$results/$name.txt"
  status=${PIPESTATUS[0]}
  case $status in
    0) summary+=("$name: passed") ;;
    124 | 137) summary+=("$name: ran out of time, see $results/$name.txt") ;;
    *) summary+=("$name: FAILED, see $results/$name.txt") ;;
  esac
  if [ "$status" != 0 ]; then failed=1; fi
}

# Without pyproject.toml, which asks for a newer pytest than a machine without network may have.
# Most of the tests' time is compiling kernels, which processes do side by side.
tests=("$python" -m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -q
  --durations=5)
if "$python" -c "import xdist" 2>/dev/null; then tests+=(-n 8); fi
bench=("$python" scripts/gpu_bench.py)

run peers 110 "${bench[@]}" --parts peers --seconds 100 --output "$results/peers.json"
if [ -n "${CB_ROLLOUT_VLLM_PYTHON:-}" ]; then
  run vllm 130 "${bench[@]}" --parts vllm --output "$results/vllm.json"
fi
run kernels 100 "${tests[@]}" tests/engine/attention/test_triton_kernels.py
run gpu_tests 120 "${tests[@]}" tests/gpu
run stages 90 "${bench[@]}" --parts stages --shapes 8B --seconds 60 --output "$results/stages.json"
run decode 230 "${bench[@]}" --parts decode lifecycle --seconds 180 --output "$results/decode.json"

printf '%s\n' "" "${summary[@]}"
exit "$failed"
