"""Every difference between torch 1.13 and 2.x that the Python code meets."""

import inspect

import torch

TORCH2 = int(torch.__version__.split(".")[0]) >= 2
_HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(torch.load).parameters


def load(path, map_location=None):
    """``torch.load`` of a file that may hold any Python object, on both."""
    return torch.load(path, map_location=map_location, **({"weights_only": False} if _HAS_WEIGHTS_ONLY else {}))


def named_parameters(module):
    """All names of all parameters, tied ones under each of their names."""
    if "remove_duplicate" in inspect.signature(torch.nn.Module.named_parameters).parameters:
        yield from module.named_parameters(remove_duplicate=False)
        return
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, param in child._parameters.items():
            if param is not None:
                yield (f"{prefix}.{name}" if prefix else name), param


def backward_id():
    """A number that tells running backward passes apart, or None where torch has none (1.13)."""
    ask = getattr(torch._C, "_current_graph_task_id", None)
    return ask() if ask is not None else None
