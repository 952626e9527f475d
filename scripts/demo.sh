#!/usr/bin/env bash
# Trains a small model on arithmetic, on the CPU. Takes the options of `cb-rollout demo`.
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
exec "$python" -m cb_rollout demo "$@"
