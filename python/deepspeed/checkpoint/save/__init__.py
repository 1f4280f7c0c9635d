"""Saving a run: which rank writes what, and snapshots in the memory of hosts."""
