"""Name the cause of a difference between a rollout's log-probabilities and the trainer's.

`auditor` scores recorded sequences under hypotheses and ranks them. `hypotheses` lists the
hypotheses that each need another forward, `readouts` those that read other numbers from the same
logits. `forwards` runs the model, `evidence` is arithmetic, `report` defines the result, and
`records` reads recorded rollouts of this and other engines. Never changes the model. Called by the
thread that trains.
"""
