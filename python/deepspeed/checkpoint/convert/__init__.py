"""Checkpoints as something else: universal ones, weights for other libraries."""
