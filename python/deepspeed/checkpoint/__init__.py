"""Saving and loading of a training run: file names and keys that outside tools depend on, and what writes them."""
