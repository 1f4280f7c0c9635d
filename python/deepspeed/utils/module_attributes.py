"""Attributes of an engine that are attributes of its model."""

import torch


def attribute_or_that_of_module(engine, name):
    """``__getattr__`` of an engine: a name that the engine does not have is looked up in the model, its ``module``.

    Python calls it for a property that has raised AttributeError, too. Then it raises that error, which says why.
    """
    own = getattr(type(engine), name, None)
    if isinstance(own, property):
        return own.__get__(engine)
    try:
        return torch.nn.Module.__getattr__(engine, name)
    except AttributeError:
        modules = engine.__dict__.get("_modules", {})
        if "module" in modules and name != "module":
            return getattr(modules["module"], name)
        raise
