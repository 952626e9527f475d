"""What an exit code of `cb-rollout` says."""

EXIT_PARTLY = 1
# The command ran, and what it says is not all well.

EXIT_FAULT = 2
# It could not be done. The code that argparse gives wrong options, which are faults of the world
# too.

EXIT_INTERRUPTED = 130
# What a shell reports of a process that Ctrl-C ended.
