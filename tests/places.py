"""Folders of this checkout."""

import os

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PEERS = os.path.join(ROOT, "tests", "data", "peer-checkpoints")  # of another implementation
PYTHON = os.path.join(ROOT, "python")
