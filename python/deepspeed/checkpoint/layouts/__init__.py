"""The layouts of checkpoint folders: names of files, and every layout read as one ``SavedState``."""
