"""What a run over a data set came to."""

from dataclasses import dataclass

from cb_rollout.tools.dataset.scores import ScoreSummary, table


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """What the file of results holds, and what this run did for it. Prints as a few lines."""

    output: str
    num_rows: int
    num_return_sequences: int
    num_sequences: int
    num_failed: int
    """Sequences whose result is an error."""
    first_error: str | None
    """What the first of them says; None: there is none."""
    num_resumed: int
    """Sequences that were there before this run."""
    num_tokens: int
    """Sampled in this run, those of interrupted sequences included."""
    seconds: float
    """From this run's first request to its last result."""
    scores: list[ScoreSummary]
    """Empty when nothing was evaluated."""

    def __str__(self) -> str:
        """Counts, speed and scores."""
        counts = f"{self.num_sequences:,} sequences of {self.num_rows:,} rows in {self.output}"
        if self.num_resumed:
            counts += f", {self.num_resumed:,} of them from before"
        if self.num_failed:
            counts += f", {self.num_failed:,} of them failed (rows with an error)"
        lines = [counts]
        if self.first_error is not None:
            lines.append(f"the first error: {self.first_error}")
            lines.append("what failed stays so; retry_failed generates it again")
        if self.num_tokens:
            speed = self.num_tokens / self.seconds
            lines.append(
                f"{self.num_tokens:,} tokens in {self.seconds:.1f} s, {speed:,.0f} tokens/s"
            )
        if self.scores:
            lines += ["", table(self.scores, self.num_return_sequences)]
        return "\n".join(lines)
