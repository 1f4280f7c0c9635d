"""Loads the device before torch: a torch that is built with CUDA refuses a second kind of device later. Python imports
this file by itself where its folder is on PYTHONPATH."""

import ctypes
import os
import sys

if os.environ.get("DS_STANDIN_TYPE") == "hpu":
    ctypes.CDLL(os.environ["DS_STANDIN_LIBRARY"], mode=os.RTLD_GLOBAL)
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
