#!/usr/bin/env bash
# Runs the tests that only a nightly run has: the rest of each full matrix. Arguments go to pytest.
exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh" -m "nightly and not gpu and not multigpu" "$@"
