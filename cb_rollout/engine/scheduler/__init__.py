"""Choose the sequences of a step by a policy, within blocks and table rows."""
