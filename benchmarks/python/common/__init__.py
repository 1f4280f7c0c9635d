"""Shared by the Python benchmarks: what machine this is, and the --json option that each of them has."""
