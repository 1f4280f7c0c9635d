"""Loading: files, their checksums, and what goes back into an engine."""
