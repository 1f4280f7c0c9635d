"""``deepspeed script.py``: starts the ranks of a job and stays responsible for them. Imports no torch."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
