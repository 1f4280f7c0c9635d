"""``deepspeed --autotuning``: finds the fastest configuration by forecasts and short real runs. Imports no torch."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__, where={"Autotuner": "deepspeed.autotuning.autotuner"})
