"""Choose which sequences run next. Knows tokens and blocks, never tensors."""
