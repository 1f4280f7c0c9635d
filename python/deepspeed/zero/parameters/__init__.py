"""Sharded parameters: how they are made, their slices, their ranks."""
