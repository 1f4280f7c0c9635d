"""Import paths of existing scripts."""
