#!/usr/bin/env bash
# Run what needs one CUDA device, most telling first, each part within a budget of seconds. Needs no
# network. What runs, and when: docs/benchmarks/README.md.
#
#     bash scripts/gpu_check.sh [FOLDER FOR THE RESULTS [ARCHIVE]]
#     bash scripts/gpu_check.sh --wheels    # print the packages that this Python lacks
#
# ARCHIVE (the folder's name with .tar.gz): all results, written anew after each part: one file to
# bring back.
# PYTHON: the Python to run (python3). GPU_CHECK_WHEELS: a folder of wheels, which are installed
# beside the results and nowhere else. CB_ROLLOUT_VLLM_PYTHON: a Python that has vLLM, which is
# compared last. GPU_CHECK_SECONDS: the time for all parts, which scales their budgets (570, or 700
# with vLLM). COMPUTE_SANITIZER: NVIDIA's memory checker, empty for none (found where CUDA is).
set -uo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
results=${1:-runs/gpu}
archive=${2:-${results%/}.tar.gz}
total=570
if [ -n "${CB_ROLLOUT_VLLM_PYTHON:-}" ]; then total=700; fi
seconds=${GPU_CHECK_SECONDS:-$total}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# The parts are themselves the trial; a child process for each of their models would take minutes.
export CB_ROLLOUT_QUALIFY=${CB_ROLLOUT_QUALIFY:-0}

# Without these nothing runs; without those below, a part or a file of tests does not.
needs=(torch transformers accelerate peft psutil)
needs_of_tests=(pytest hypothesis triton)
# What TRL and datasets need, for the part `grpo` alone.
needs_of_grpo=(trl datasets jinja2 numpy pandas python-dateutil tzdata pyarrow dill multiprocess
  xxhash fsspec tqdm filelock pyyaml packaging huggingface_hub)

if [ "$results" = --wheels ]; then
  exec "$python" - "${needs[@]}" "${needs_of_tests[@]}" "${needs_of_grpo[@]}" <<'END'
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

# Print each package that cannot be imported, and why; also where torch sees no device.
missing_of() {
  "$python" - "$@" <<'END' || echo "a Python that starts: PYTHON=$python does not"
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name} ({type(error).__name__}: {error})".splitlines()[0])
if "torch" in sys.modules and not sys.modules["torch"].cuda.is_available():
    print("a CUDA device: torch sees none")
END
}

lacking=
missing=$(missing_of "${needs[@]}")
if [ -n "$missing" ]; then
  echo "gpu_check needs what $python lacks:"
else
  lacking=$(missing_of "${needs_of_tests[@]}" trl datasets)
  if [ -n "$lacking" ]; then
    echo "Parts and tests that need these fail, since $python lacks them:"
  fi
fi
if [ -n "$missing$lacking" ]; then
  echo "$missing$lacking"
  echo "Install the packages there. Without network: bash scripts/gpu_check.sh --wheels there, on"
  echo "  another machine pip download --no-deps -d FOLDER NAMES, and GPU_CHECK_WHEELS=FOLDER."
fi
if [ -n "$missing" ]; then exit 2; fi

summary=()
records=()
failed=0
begun=$SECONDS
reserved=0
# Seconds of each part in the background, side by side.
background_budget=130

# Each part's budget, exit status (null: it did not run) and seconds: whole JSON at any time.
write_parts() {
  local IFS=,
  echo "{${records[*]}}" >"$results/parts.unfinished"
  mv "$results/parts.unfinished" "$results/parts.json"
  tar -czf "$archive.unfinished" -C "$results" --exclude ./site --exclude '*.unfinished' \
    --exclude "${archive##*/}" .
  mv "$archive.unfinished" "$archive"
}

# record NAME BUDGET EXIT SECONDS: keep how a part ended.
record() {
  case $3 in
    0) summary+=("$1: passed") ;;
    null) summary+=("$1: not reached") ;;
    124 | 137) summary+=("$1: ran out of time, see $results/$1.txt") ;;
    *) summary+=("$1: FAILED, see $results/$1.txt") ;;
  esac
  if [ "$3" != 0 ]; then failed=1; fi
  records+=("\"$1\":{\"budget\":$2,\"exit\":$3,\"seconds\":$4}")
  write_parts
}

# background NAME COMMAND...: begin a part beside the others; `finish NAME` waits for it.
declare -A pids=()
trap 'kill "${pids[@]}" 2>/dev/null' EXIT
background() {
  local name=$1 limit=$((background_budget * seconds / total))
  shift
  # No limit to `timeout` is 0.
  if [ "$limit" -lt 1 ]; then limit=1; fi
  timeout --kill-after=2 "$limit" "$@" \
    >"$results/$name.txt" 2>&1 &
  pids[$name]=$!
}

# finish NAME: wait until a part in the background ends, and keep how.
finish() {
  local status
  wait "${pids[$1]}"
  status=$?
  unset "pids[$1]"
  record "$1" "$background_budget" "$status" "$((SECONDS - begun))"
}

# run NAME BUDGET COMMAND...: run one part, until its budget and what earlier ones left are spent.
run() {
  local name=$1 budget=$2 start=$SECONDS end status=null
  shift 2
  reserved=$((reserved + budget))
  end=$((begun + reserved * seconds / total))
  if [ "$end" -gt "$seconds" ]; then end=$seconds; fi
  if [ "$end" -gt "$start" ]; then
    echo "== $name"
    # Into a file, because a pipe would wait for whatever a killed part started.
    : >"$results/$name.txt"
    timeout --kill-after=2 "$((end - start))" "$@" >>"$results/$name.txt" 2>&1 &
    tail -n +1 -s 0.2 -f --pid=$! "$results/$name.txt"
    wait $!
    status=$?
  fi
  record "$name" "$budget" "$status" "$((SECONDS - start))"
}

# Without pyproject.toml, which asks for a newer pytest than a machine without network may have. A
# file whose imports fail is one failure. A test that hangs shows where.
tests=("$python" -m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -q
  --durations=5 --continue-on-collection-errors -o faulthandler_timeout=40)
# Most of the tests' time is compiling kernels, which processes do side by side.
workers=()
if "$python" -c "import xdist" 2>/dev/null; then workers=(-n 8); fi
bench=("$python" scripts/gpu/bench.py)
bench() { run "$1" "$2" "${bench[@]}" --output "$results/$1.json" "${@:3}"; }
kernel_tests=tests/engine/attention/test_triton_kernels.py

sanitizer=${COMPUTE_SANITIZER-$(command -v compute-sanitizer ||
  ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)}

# Compiling the forward of a whole model takes a minute on one thread. What these compile, the parts
# of the same names find in the cache.
background compile_0.6B "${bench[@]}" --parts compile --shapes 0.6B
background compile_grpo "${bench[@]}" --parts compile_grpo
background compile_8B "${bench[@]}" --parts compile --shapes 8B

run preflight 20 "$python" scripts/gpu/preflight.py
run shapes 35 "${tests[@]}" "${workers[@]}" tests/gpu/test_real_shapes_on_gpu.py "$kernel_tests" \
  -k "real_shape or in_bfloat16_are_rounded_once or large_heads"
run gpu_tests 75 "${tests[@]}" "${workers[@]}" tests/gpu --ignore tests/gpu/test_real_shapes_on_gpu.py
finish compile_0.6B
bench decode_0.6B 50 --parts decode lifecycle --shapes 0.6B
finish compile_grpo
bench grpo 60 --parts grpo
run kernels 40 "${tests[@]}" "${workers[@]}" "$kernel_tests"
if [ -n "$sanitizer" ]; then
  # Torch's allocator would hide reads beyond a tensor's end.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 run sanitizer 40 "$sanitizer" --tool memcheck \
    --error-exitcode 9 "${tests[@]}" "$kernel_tests" \
    -k "in_bfloat16_are_rounded_once or large_heads or window_is_what_is_cut or one_group_is_cut"
else
  summary+=("sanitizer: left out, there is no compute-sanitizer")
fi
finish compile_8B
bench decode_8B 80 --parts decode lifecycle --shapes 8B
bench peers 120 --parts peers
bench stages 50 --parts stages --shapes 8B
if [ -n "${CB_ROLLOUT_VLLM_PYTHON:-}" ]; then bench vllm 130 --parts vllm; fi

printf '%s\n' "" "${summary[@]}" "" "all results: $archive"
cat "$results/parts.json"
exit "$failed"
