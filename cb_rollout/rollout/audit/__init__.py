"""Name the cause of a difference between a rollout's log-probabilities and the trainer's.

`auditor` scores recorded sequences under hypotheses and ranks them; `hypotheses` lists those that
need forwards of their own, `readouts` those that read other numbers from the same logits.
`forwards` runs the model, `evidence` is arithmetic, `report` holds what is said, and `records`
reads rollouts of other engines. Changes nothing of the model. Called by the thread that trains.
"""
