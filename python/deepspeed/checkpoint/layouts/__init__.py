"""What stands where in the folder of a checkpoint, and every layout read as one ``SavedState``."""
