"""Where cb_rollout meets other frameworks: one file for each, and that file alone imports it."""
