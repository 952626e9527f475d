#!/usr/bin/env bash
# Trains a small model on arithmetic, on the CPU. Arguments go to the recipe.
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
exec "$python" "$root/recipes/arithmetic_cpu.py" "$@"
