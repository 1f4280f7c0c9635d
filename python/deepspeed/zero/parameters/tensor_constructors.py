"""torch's tensor constructors before anybody wraps them, and the wrapper that gives what they make dtype and device.

``zero.Init`` itself wraps none of them: it converts *parameters* when their module is complete, and leaves buffers and
other tensors of a constructor as the model's author made them (a rotary embedding's frequencies stay fp32). The names
are here for libraries that exchange the wrapper for one of their own while a model is built.
"""

import functools

import torch

_orig_torch_tensor = torch.tensor
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn


def zero_wrapper_for_fp_tensor_constructor(fn, target_fp_dtype, target_device=None):
    """``fn`` (``torch.zeros``, ...) with floating-point results in ``target_fp_dtype``.

    Args:
        fn: a function that returns a tensor and takes ``device=``.
        target_fp_dtype: dtype of floating-point results, None: as ``fn`` makes them. Integers keep theirs.
        target_device: where tensors are made if the call names no device, None: where ``fn`` makes them.
    """

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        if target_fp_dtype is not None and tensor.is_floating_point():
            return tensor.to(target_fp_dtype)
        return tensor

    return wrapped
