"""Saving: what an engine puts into which file, and how a folder of them appears whole."""
