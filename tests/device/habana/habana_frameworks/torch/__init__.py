"""As the real one: importing it makes the device. ``hpu_environment`` of standin.py starts processes that have it."""

import standin

standin.load()
