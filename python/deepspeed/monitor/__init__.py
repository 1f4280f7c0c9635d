"""Monitors: where metrics of a run go."""
