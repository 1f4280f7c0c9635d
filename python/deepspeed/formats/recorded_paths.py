"""The one way from a name that a file or a socket says to a path: ``csrc/io/folders/paths.h``.

Code that runs without torch takes ``deepspeed.host.recorded_names``. A house test lists every other module that joins
names to a folder.
"""

from deepspeed._native import _C

path_below = _C.io.path_below
remove_below = _C.io.remove_below
