"""What is known of models with experts: names of their modules, and how their routers choose."""

from deepspeed.registry import lazy_package

__getattr__, __dir__ = lazy_package(__name__)
