"""Choose the sequences of a step, within blocks and table rows."""
