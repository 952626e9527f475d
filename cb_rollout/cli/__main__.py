"""`python -m cb_rollout.cli`, where the script is not installed."""

import sys

from cb_rollout.cli import main

sys.exit(main())
