"""Whole values of sharded parameters while they are needed."""
