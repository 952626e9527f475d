#!/usr/bin/env bash
# Run what needs one CUDA device, most telling first, each part within a budget of seconds. Needs no
# network. What runs, and when: docs/benchmarks/README.md.
#
#     bash scripts/gpu_check.sh [FOLDER FOR THE RESULTS [ARCHIVE]]
#     bash scripts/gpu_check.sh --wheels    # print the packages that this Python lacks
#
# ARCHIVE: a .tar.gz of the results, written anew after each part: one file to bring back.
# PYTHON: the Python to run (python3). GPU_CHECK_WHEELS: a folder of wheels, which are installed
# beside the results and nowhere else. CB_ROLLOUT_VLLM_PYTHON: a Python that has vLLM, which is
# compared last. GPU_CHECK_SECONDS: the time for all parts, which scales their budgets (570, or 700
# with vLLM).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
results=${1:-runs/gpu}
archive=${2:-}
total=570
if [ -n "${CB_ROLLOUT_VLLM_PYTHON:-}" ]; then total=700; fi
seconds=${GPU_CHECK_SECONDS:-$total}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

# What every part needs; then what TRL and datasets need more, for the part `grpo` alone.
needs=(torch transformers triton accelerate peft psutil pytest hypothesis)
needs_of_grpo=(trl datasets jinja2 numpy pandas python-dateutil tzdata pyarrow dill multiprocess
  xxhash fsspec tqdm filelock pyyaml packaging huggingface_hub)

if [ "$results" = --wheels ]; then
  exec "$python" - "${needs[@]}" "${needs_of_grpo[@]}" <<'END'
import importlib.metadata, re, sys
from pathlib import Path
def canonical(name):
    return re.sub("[-_.]+", "-", name).lower()
lines = Path("constraints.txt").read_text().splitlines()
pinned = {canonical(line.split("==")[0]): line for line in lines if "==" in line}
for name in sys.argv[1:]:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(pinned.get(canonical(name), name))
END
fi

mkdir -p "$results"
if [ -n "${GPU_CHECK_WHEELS:-}" ]; then
  site=$(cd "$results" && pwd)/site
  "$python" -m pip install --quiet --no-index --no-deps --upgrade --target "$site" \
    "$GPU_CHECK_WHEELS"/*.whl || exit 2
  export PYTHONPATH="$PYTHONPATH:$site"
fi

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
  echo "Install the packages there. Without network: bash scripts/gpu_check.sh --wheels there, on"
  echo "  another machine pip download --no-deps -d FOLDER NAMES, and GPU_CHECK_WHEELS=FOLDER."
  exit 2
fi

summary=()
records=()
failed=0
begun=$SECONDS
reserved=0

# Each part's budget, exit status (null: it did not run) and seconds: whole JSON at any time.
write_parts() {
  local IFS=,
  echo "{${records[*]}}" >"$results/parts.unfinished"
  mv "$results/parts.unfinished" "$results/parts.json"
  if [ -n "$archive" ]; then
    tar -czf "$archive.unfinished" -C "$results" --exclude ./site --exclude '*.unfinished' \
      --exclude "${archive##*/}" .
    mv "$archive.unfinished" "$archive"
  fi
}

# run NAME BUDGET COMMAND...: run one part, until its budget and what earlier ones left are spent.
run() {
  local name=$1 budget=$2 start=$SECONDS end status=null
  shift 2
  reserved=$((reserved + budget))
  end=$((begun + reserved * seconds / total))
  if [ "$end" -gt "$seconds" ]; then end=$seconds; fi
  if [ "$end" -le "$start" ]; then
    summary+=("$name: not reached")
  else
    echo "== $name"
    # Into a file, because a pipe would wait for whatever a killed part started.
    : >"$results/$name.txt"
    timeout --kill-after=2 "$((end - start))" "$@" >>"$results/$name.txt" 2>&1 &
    tail -n +1 -s 0.2 -f --pid=$! "$results/$name.txt"
    wait $!
    status=$?
    case $status in
      0) summary+=("$name: passed") ;;
      124 | 137) summary+=("$name: ran out of time, see $results/$name.txt") ;;
      *) summary+=("$name: FAILED, see $results/$name.txt") ;;
    esac
  fi
  if [ "$status" != 0 ]; then failed=1; fi
  records+=("\"$name\":{\"budget\":$budget,\"exit\":$status,\"seconds\":$((SECONDS - start))}")
  write_parts
}

# Without pyproject.toml, which asks for a newer pytest than a machine without network may have.
# Most of the tests' time is compiling kernels, which processes do side by side.
tests=("$python" -m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -q
  --durations=5)
if "$python" -c "import xdist" 2>/dev/null; then tests+=(-n 8); fi
bench() { run "$1" "$2" "$python" scripts/gpu_bench.py --output "$results/$1.json" "${@:3}"; }

run gpu_tests 100 "${tests[@]}" tests/gpu
bench decode_0.6B 55 --parts decode lifecycle --shapes 0.6B
bench grpo 85 --parts grpo
run kernels 40 "${tests[@]}" tests/engine/attention/test_triton_kernels.py
bench decode_8B 90 --parts decode lifecycle --shapes 8B
bench peers 150 --parts peers
bench stages 50 --parts stages --shapes 8B
if [ -n "${CB_ROLLOUT_VLLM_PYTHON:-}" ]; then bench vllm 130 --parts vllm; fi

printf '%s\n' "" "${summary[@]}"
cat "$results/parts.json"
exit "$failed"
