"""The empty tensor that stands for the values of a sharded parameter while a rank does not hold them.

Libraries copy, move and look at parameters whose values they do not need: to name what they save, to count, to tell
tied ones apart. They get an empty tensor and go on, and one warning for each line of the user's program says whose
values it lacks. What computes with the values, or writes them, raises: nothing is lost silently.
"""

import copy
import os
import pickle
import sys

import torch

from deepspeed.log import print_rank, warning_once
from deepspeed.zero.nested import tensors_in

# Members that work for a parameter without values: facts about the object, not about its values.
HARMLESS = {
    "size", "dim", "ndimension", "nelement", "numel", "element_size", "is_floating_point", "is_complex", "is_signed",
    "is_contiguous", "stride", "storage_offset", "get_device", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__repr__", "__format__", "__hash__",
    "__deepcopy__", "__reduce_ex__", "is_pinned", "is_shared", "is_inference", "has_names", "__dir__",
    "is_distributed", "_has_compatible_shallow_copy_type", "can_cast", "result_type", "is_same_size", "__len__",
    "is_conj", "is_neg", "_is_view", "dim_order", "as_subclass",
}  # fmt: skip
# Tensors of a size of their own that take only dtype and device from the parameter.
HARMLESS |= {"new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"}
ACCESSORS = {"__get__", "__set__", "__delete__"}
# Properties that are views of the values.
_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}
# Members that Module.to and Module.state_dict call. The first argument may be another tensor, which takes dtype and
# device from the parameter.
CONVERTING = {
    "detach", "to", "type", "type_as", "cpu", "cuda", "xpu", "npu", "half", "float", "double", "bfloat16",
    "byte", "char", "short", "int", "long", "bool",
}  # fmt: skip
# Addresses tell tied parameters apart: those of memory that was gathered for the question would make strangers equal.
_ADDRESSES = {"data_ptr", "untyped_storage", "storage", "_typed_storage"}
# Other members that copy values, move them or read their bytes.
_COPYING = _ADDRESSES | {
    "clone", "detach_", "contiguous", "numpy", "tolist", "__array__", "pin_memory", "share_memory_", "alias", "flatten",
    "ravel", "__dlpack__",
}  # fmt: skip
EMPTY_WHILE_BUILDING = CONVERTING | _ADDRESSES  # zero.Init gathers for everything else
_RESHAPING = {"view", "reshape"}  # to one dimension of any length, or to the bytes


def operation_of(func):
    """The name of what ``__torch_function__`` is asked to do; that of the property for ``T``, ``real`` and the like."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if attribute in _VIEWS else name
    return name


def is_data_getter(func):
    """Whether it reads ``tensor.data``."""
    return func == torch.Tensor.data.__get__  # every access makes a new method-wrapper: compare with ==


def first_of(args, kwargs):
    """The tensor that the operation works on."""
    return args[0] if args else kwargs.get("input")


def needs_no_values(name, given, released):
    """Whether an operation asks for facts alone, or its first argument ``given`` is not of the class ``released``:
    another tensor, which becomes like the parameter."""
    return name in HARMLESS or name in ACCESSORS or (name in CONVERTING and not isinstance(given, released))


def only_copies(name, args, kwargs):
    """Whether the operation only copies, moves or looks at its first argument, so that an empty tensor will do."""
    if name in CONVERTING or name in _COPYING:
        return True
    # transformers pads a tied head's bias to the rows of its weight: both have none here, and nothing is added.
    if name == "pad":
        return not any(args[1] if len(args) > 1 else kwargs["pad"])
    if name in _RESHAPING:
        shape = args[1:] + tuple(kwargs.values())
        return len(shape) == 1 and (isinstance(shape[0], torch.dtype) or shape[0] in (-1, (-1,), [-1], (0,), [0]))
    return False


def run_plainly(func, args, kwargs):
    """The operation as torch has it, on the empty tensor."""
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)


class ReleasedData(torch.Tensor):
    """An empty tensor instead of values that are not here: ``.data`` of a released parameter, and copies of it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operation_of(func)
        if is_data_getter(func):
            return as_released(run_plainly(func, args, kwargs), args[0].ds_name, args[0].ds_full_shape)
        given = first_of(args, kwargs)
        if needs_no_values(name, given, ReleasedData):
            return run_plainly(func, args, kwargs)
        if isinstance(given, ReleasedData) and only_copies(name, args, kwargs):
            return empty_result(func, args, kwargs, given.ds_name, given.ds_full_shape)
        data = next(one for one in tensors_in((args, kwargs)) if isinstance(one, ReleasedData))
        raise RuntimeError(untouchable(data.ds_name, data.ds_full_shape, name))

    def __deepcopy__(self, memo):
        return as_released(run_plainly(torch.Tensor.clone, (self,), {}), self.ds_name, self.ds_full_shape)

    def __reduce_ex__(self, protocol):
        """Pickled it is a plain empty tensor, which any process can read."""
        warn_of_empty("pickling", self.ds_name, self.ds_full_shape)
        return run_plainly(torch.empty, (0,), {"dtype": self.dtype, "device": self.device}).__reduce_ex__(protocol)


def as_released(tensor, name, shape):
    """``tensor``, which is empty, as the data of parameter ``name``."""
    data = tensor.as_subclass(ReleasedData)
    data.ds_name, data.ds_full_shape = name, shape
    return data


def empty_result(func, args, kwargs, name, shape):
    """Runs an operation for which ``only_copies`` holds on the empty tensor of parameter ``name``."""
    result = run_plainly(func, args, kwargs)
    unchanged = result is first_of(args, kwargs)
    shared = getattr(func, "__name__", "") == "share_memory_"  # the values would have to move
    if (unchanged and not shared) or isinstance(result, str):  # nothing was copied; type() names the type
        return result
    # The names of a state dict are asked for more often than its values: its entries warn when they are used.
    if sys._getframe(2).f_code.co_name != "_save_to_state_dict":
        warn_of_empty(operation_of(func), name, shape)
    return as_released(result, name, shape) if isinstance(result, torch.Tensor) and not unchanged else result


def _folder(path):
    return os.path.dirname(os.path.abspath(path)) + os.sep


_PASSED_ON = (_folder(torch.__file__), _folder(os.path.dirname(__file__)), copy.__file__, pickle.__file__)
_LIBRARIES = ("site-packages" + os.sep, "dist-packages" + os.sep, _folder(os.__file__))


def _lines():
    """The line that asked, in a file of neither torch nor this library, and the line of the user's own program that
    led there; the same one where no other library is in between, or nothing else. None without either."""
    frame, asking = sys._getframe(2), None
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if not path.startswith(_PASSED_ON):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            asking = asking or line
            if not any(folder in path for folder in _LIBRARIES):
                return asking, line
        frame = frame.f_back
    return asking and (asking, asking)


def warn_of_empty(operation, name, shape):
    """One warning for each line of the user's program."""
    lines = _lines()
    if lines is None:
        return
    asking, calling = lines
    where = asking if asking == calling else f"{asking}, called from {calling},"
    warning_once(
        f"{operation} at {where} gives an empty tensor: the values of parameter '{name}' {shape} are not on rank "
        f"{print_rank()}, ZeRO stage 3 holds slices. To have them, run the line inside `with "
        "deepspeed.zero.GatheredParameters(parameter):`; to save them, engine.save_checkpoint or "
        f"engine.save_16bit_model. There will be no other warning about {calling}.",
        key=("empty tensor of a released parameter", calling),
    )


def untouchable(name, shape, operation):
    """The text of the error when values are computed with, or written, that are not here."""
    return (
        f"{operation}: the values of parameter '{name}' {shape} are not on this rank: ZeRO stage 3 holds slices. "
        "Use them inside `with deepspeed.zero.GatheredParameters(parameter):` (with modifier_rank=0 to change them), "
        "or in the forward of a module of the model that deepspeed.initialize has wrapped."
    )
