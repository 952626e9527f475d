#!/usr/bin/env bash
# Runs the tests, offline. Arguments go to pytest: scripts/test.sh tests/engine -x -n 0
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# The models are tiny: a process a core uses the cores better than threads do.
export OMP_NUM_THREADS=1
# Workers and the processes that tests start read each other's compiled modules. Without those, each
# compiles the whole package and the tests again.
unset PYTHONDONTWRITEBYTECODE
# tests/conftest.py orders the files, the longest first.
exec "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
    --durations 20 "$@"
