"""The tests of this folder import the module that runs the ported programs; ranks get the same path."""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if HERE not in sys.path:
    sys.path.append(HERE)
