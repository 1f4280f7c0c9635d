"""The quickstart's files are no package: scripts that import each other by name."""

import os
import sys

QUICKSTART = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..", "..", "examples", "quickstart"))
sys.path.insert(0, QUICKSTART)
