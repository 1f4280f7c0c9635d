"""Ranks and sizes that the launcher told this process; arguments of operations."""

import functools
import inspect

import torch

from deepspeed.host.variables import number

# The parameter that holds what an operation moves, by preference.
_DATA = ("tensor", "tensors", "input_list", "input_tensor_list", "input_tensors", "input_tensor", "input")

_number = functools.partial(number, what="a whole number that the launcher sets", kind=int)


def get_local_rank_from_launcher():
    """``LOCAL_RANK``, or Open MPI's; 0 without a launcher."""
    return _number("LOCAL_RANK", _number("OMPI_COMM_WORLD_LOCAL_RANK", 0))


def get_world_rank_from_launcher():
    """``RANK``, or Open MPI's; 0 without a launcher."""
    return _number("RANK", _number("OMPI_COMM_WORLD_RANK", 0))


def get_world_size_from_launcher():
    """``WORLD_SIZE``, or Open MPI's; 1 without a launcher."""
    return _number("WORLD_SIZE", _number("OMPI_COMM_WORLD_SIZE", 1))


# ---- the arguments of an operation ----------------------------------------------------------------------------------
@functools.lru_cache(maxsize=None)
def _signature(func):
    return inspect.signature(func)


def get_default_args(func):
    """dict: parameter -> default, of the parameters of ``func`` that have one."""
    return {
        name: parameter.default
        for name, parameter in _signature(func).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


def argument_names(func, args, kwargs):
    """dict: parameter -> value of a call ``func(*args, **kwargs)``, defaults included."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def get_tensor_position(func):
    """The position among the parameters of ``func`` of the one that holds what is moved; -1 without one."""
    names = list(_signature(func).parameters)
    return next((names.index(name) for name in _DATA if name in names), -1)


def get_tensor_kwarg(func, kwargs):
    """The tensors that are moved, from the keyword arguments of a call or the defaults of ``func``; None: neither has
    it."""
    given = {**get_default_args(func), **kwargs}
    return next((given[name] for name in _DATA if given.get(name) is not None), None)


def get_msg_size_from_args(func, *args, **kwargs):
    """Bytes that a rank passes to a call ``func(*args, **kwargs)``: of a tensor, or of all tensors of a list."""
    position = get_tensor_position(func)
    return _bytes_of(args[position] if 0 <= position < len(args) else get_tensor_kwarg(func, kwargs))


def size_of_arguments(given):
    """The same from ``argument_names``."""
    return _bytes_of(next((given[name] for name in _DATA if given.get(name) is not None), None))


def _bytes_of(moved):
    if torch.is_tensor(moved):
        return moved.numel() * moved.element_size()
    return sum(map(_bytes_of, moved)) if isinstance(moved, (list, tuple)) else 0


def get_debug_log_name(func_args, debug):
    """The name an operation is recorded under: ``log_name``, with the caller ``func_args["debug"]`` if ``debug``."""
    return f"{func_args['log_name']} | [Caller Func: {func_args['debug']}]" if debug else func_args["log_name"]
