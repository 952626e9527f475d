"""What this machine and a checkpoint give a rollout."""

from cb_rollout.tools.doctor.checkpoint import checkpoint_findings
from cb_rollout.tools.doctor.finding import Finding, Level
from cb_rollout.tools.doctor.machine import machine_findings

__all__ = ["Finding", "Level", "checkpoint_findings", "machine_findings"]
