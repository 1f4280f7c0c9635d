"""Reads bundles of the section ``postmortem`` and runs the step in them again: the program ``ds_postmortem``."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
