"""`python -m cb_rollout.tools.cli`, where the script is not installed."""

import sys

from cb_rollout.tools.cli import main

sys.exit(main())
