"""`python -m cb_rollout`: the command line, for environments without the `cb-rollout` script."""

import sys

from cb_rollout.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
