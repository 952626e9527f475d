#!/usr/bin/env bash
# Runs the tests, offline. Arguments go to pytest: scripts/test.sh tests/unit -x
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
cd "$root"
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
exec "$python" -m pytest "$@"
