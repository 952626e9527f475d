"""Connect TRL, wandb and xgrammar; each is imported in one file.

Called by users' scripts and by the trainers that are attached.
"""
