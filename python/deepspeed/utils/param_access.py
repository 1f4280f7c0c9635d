"""Read and change what training keeps of a parameter: its fp32 master, its gradient, its optimizer states.

The engine puts ``_ds_link`` on the parameters it trains; a link knows which rank holds which elements:

- ``get(kind)``: the whole tensor, collected from all ranks, in the parameter's shape; None where no rank has it.
- ``set(kind, value)``: every rank passes the same whole value and takes what it owns of it.
- ``pieces(kind)``: ``[(offset, numel, view)]`` of this rank's elements, offsets counted in the parameter.

``kind`` is "fp32", "grad" or the name of an optimizer state.

Full functions, and ``safe_set_local_fp32_param``, are collective: every rank calls them, for the same parameters in
the same order, also where it owns nothing. They return copies. They are called between backward and step, or
after step, when there are no gradients any more. Gradients are means over ranks and accumulation steps, without the
loss scale, complete after the backward of the last accumulation step.

A parameter that no engine trains is its own master if it is fp32 or fp64 and wants a gradient, and its gradient is its
``.grad``. A frozen one, and one of 16 bits, has no fp32 value (None); setting what is not there is a ValueError.
"""

import torch

# ---- whole tensors --------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_fp32_param(param):
    """The parameter's fp32 value (fp64 for fp64 ones) in its full shape: a copy on every rank. None: there is none, as
    for frozen parameters."""
    return _keeper(param).get("fp32")


@torch.no_grad()
def safe_get_full_grad(param):
    """The parameter's gradient, fp32 (fp64 for fp64 ones), in its full shape: a copy on every rank.

    None when no rank has one: before the backward of a step, after the step, and for unused parameters. Between the
    micro-steps of stage 1, too, until they are reduced; inside ``engine.no_sync()`` it is what this rank alone has
    accumulated.
    """
    return _keeper(param).get("grad")


@torch.no_grad()
def safe_get_full_optimizer_state(param, optim_state_key):
    """The state ``optim_state_key``, as in "exp_avg", in the parameter's full shape: a copy on every rank.

    None when the optimizer has no such state with a value for each element, or not yet: many make theirs in their first
    step.
    """
    return _keeper(param).get(optim_state_key)


@torch.no_grad()
def safe_set_full_fp32_param(param, value):
    """Sets the fp32 value, and with it the model's weight. ``value``: in the parameter's shape or flat, any dtype.

    Every rank passes the same value. Raises ValueError when it does not fit or when there is no fp32 value to set.
    """
    _keeper(param).set("fp32", _fitting(param, value))


@torch.no_grad()
def safe_set_full_grad(param, value):
    """Sets the gradient that the next step uses. ``value``: in the parameter's shape or flat, any dtype.

    Every rank passes the same value, which is rounded to the dtype that gradients are kept in (see ``ds_config
    explain``). A parameter that had no gradient has one from now on. Raises ValueError when the value does not fit.
    """
    _keeper(param).set("grad", _fitting(param, value))


@torch.no_grad()
def safe_set_full_optimizer_state(param, value, optim_state_key):
    """Sets the state ``optim_state_key``. ``value``: in the parameter's shape or flat, any dtype, equal on all ranks.

    Raises ValueError when it does not fit, or when the optimizer has no such state, or not yet.
    """
    value, link = _fitting(param, value), _link(param)
    if link is not None and link.get(optim_state_key) is None:
        raise ValueError(_nothing(optim_state_key, param))
    _keeper(param).set(optim_state_key, value)


def safe_update_full_grad_vectorized(param_list, update_func):
    """Replaces gradients: ``update_func(grad, param)`` gets each whole gradient and returns the new one.

    Parameters without a gradient are left out. ``update_func`` may also change ``grad`` in place and return None. It
    runs on every rank and must do the same on all of them.
    """
    params = list(param_list)
    for param, grad in [(param, safe_get_full_grad(param)) for param in params]:
        if grad is not None:
            new = update_func(grad, param)
            safe_set_full_grad(param, grad if new is None else new)


# ---- this rank's part -----------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_local_fp32_param(param):
    """This rank's part of the fp32 value, flat, a copy; no communication.

    At stage 3 it has the shape of ``param.ds_tensor``: zeros follow the last element. At stages 1 and 2 parameters are
    cut where the shares of ranks end, so a part may have any length; None where this rank owns nothing.
    """
    return _local(param, "fp32")


@torch.no_grad()
def safe_get_local_grad(param):
    """This rank's part of the gradient, in the shape of ``safe_get_local_fp32_param``. None where there is none."""
    found, link = _local(param, "grad"), _link(param)
    return found if found is None or link is None or _scale(link) == 1.0 else found.div_(_scale(link))


@torch.no_grad()
def safe_get_local_optimizer_state(param, optim_state_key):
    """This rank's part of a state, in the shape of ``safe_get_local_fp32_param``. None where there is none."""
    return _local(param, optim_state_key)


@torch.no_grad()
def safe_set_local_fp32_param(param, value):
    """Sets this rank's part of the fp32 value, and with it the model's weight on all ranks: every rank calls it.

    ``value`` has the shape that ``safe_get_local_fp32_param`` returns, and is None where that is. Raises ValueError
    when it does not fit.
    """
    _set_local(param, "fp32", value)


@torch.no_grad()
def safe_set_local_grad(param, value):
    """Sets this rank's part of a gradient that is there; no communication.

    ``value`` has the shape that ``safe_get_local_grad`` returns. Raises ValueError when it does not fit or no rank has
    a gradient; ``safe_set_full_grad`` makes one.
    """
    link = _link(param)
    _set_local(param, "grad", value if link is None or value is None else value * _scale(link))


@torch.no_grad()
def safe_set_local_optimizer_state(param, value, optim_state_key):
    """Sets this rank's part of a state; no communication.

    ``value`` has the shape that ``safe_get_local_optimizer_state`` returns. Raises ValueError when it does not fit, or
    when the optimizer has no such state, or not yet.
    """
    _set_local(param, optim_state_key, value)


# ---- how ------------------------------------------------------------------------------------------------------------


def _link(param):
    link = getattr(param, "_ds_link", None)
    return None if link is None or link.owner is None else link


def _keeper(param):
    """The object whose ``get(kind)`` and ``set(kind, value)`` reach what training keeps of ``param``."""
    kind = _Fragments if "get_full_hp_param" in param.__dict__ else _Untrained
    return _link(param) or kind(param)


class _Fragments:
    """The fragments of a parameter that ``mixed_precision_linkage.link_hp_params`` has been given."""

    def __init__(self, param):
        self.param = param

    def get(self, kind):
        return self.param.get_full_hp_grad() if kind == "grad" else self.param.get_full_hp_param(*_state_of(kind))

    def set(self, kind, value):
        if kind == "grad":
            self.param.set_full_hp_grad(value)
        else:
            self.param.set_full_hp_param(value, *_state_of(kind))


def _state_of(kind):
    return () if kind == "fp32" else (kind,)


class _Untrained(_Fragments):
    """The fragments of a parameter that no engine trains."""

    def get(self, kind):
        param = self.param
        if kind == "fp32" and _is_own_master(param):
            return _with_values(param, lambda: param.detach().clone())
        has_grad = kind == "grad" and param.grad is not None and param.requires_grad
        return _widened(param.grad).clone() if has_grad else None

    def set(self, kind, value):
        param = self.param
        if kind == "fp32" and _is_own_master(param):
            _with_values(param, lambda: param.detach().copy_(value), changed=True)
        elif kind == "grad" and param.grad is not None:
            param.grad.copy_(value)
        elif kind == "grad" and not hasattr(param, "ds_id"):
            param.grad = value.to(param).clone()
        else:
            raise ValueError(_nothing(kind, param))


def _scale(link):
    """The factor of gradients until the step."""
    return float(link.owner.loss_scale)


def _is_own_master(param):
    return param.requires_grad and param.dtype in (torch.float32, torch.float64)


def _widened(tensor):
    return tensor.detach() if tensor.dtype == torch.float64 else tensor.detach().float()


def _with_values(param, body, changed=False):
    """``body()`` while the values of ``param``, which may be a sharded one that is not trained, are here."""
    if not hasattr(param, "ds_id"):
        return body()
    param.all_gather()
    try:
        return body()
    finally:
        param.partition(has_been_updated=changed)


def shape_of(param):
    """The shape of a parameter, also of a sharded one whose values are not here."""
    return getattr(param, "ds_shape", param.shape)


def _called(param):
    handle, shape = getattr(param, "ds_handle", None), tuple(shape_of(param))
    return f"parameter {shape}" if handle is None else f"parameter '{handle.name}' {shape}"


def _nothing(kind, param):
    what = {"grad": "gradient", "fp32": "fp32 value"}.get(kind, f"optimizer state {kind!r}")
    return (
        f"{_called(param)} has no {what} to set. What can be set is what training keeps of the parameters that the "
        "engine's optimizer updates; optimizer states exist once the optimizer has made them, often in its first step."
    )


def _fitting(param, value):
    if not torch.is_tensor(value):
        raise TypeError(f"{_called(param)} takes a tensor, got {type(value).__name__}")
    shape, value = shape_of(param), value.detach()
    if value.shape == shape:
        return value
    if value.dim() == 1 and value.numel() == shape.numel():
        return value.reshape(shape)
    raise ValueError(f"{_called(param)} cannot take a value of shape {tuple(value.shape)}")


def _slice_numel(param):
    """Elements of a slice with its padding; None where parameters are not sliced one by one."""
    handle = getattr(param, "ds_handle", None)
    return None if handle is None else handle.slice_numel


def _local(param, kind):
    link = _link(param)
    if link is None:
        return _keeper(param).get(kind)
    pieces, padded = link.pieces(kind), _slice_numel(param)
    if not pieces and (padded is None or link.pieces("fp32")):
        return None
    parts = [_widened(view).reshape(-1) for _, _, view in pieces]
    own = sum(part.numel() for part in parts)
    if padded is not None and own < padded:
        device = parts[0].device if parts else param.ds_handle.device
        parts.append(torch.zeros(padded - own, dtype=torch.float32, device=device))
    return torch.cat(parts)  # a copy, of one part too


def _set_local(param, kind, value):
    link = _link(param)
    if link is None:
        _keeper(param).set(kind, _fitting(param, value))
        return
    pieces = link.pieces(kind)
    own = sum(numel for _, numel, _ in pieces)
    padded = _slice_numel(param)
    expected = own if padded is None else padded
    if not pieces and link.pieces("fp32"):
        raise ValueError(_nothing(kind, param))
    given = 0 if value is None else value.numel()
    if given not in (expected, own):
        raise ValueError(f"{_called(param)}: this rank's part has {expected} elements, the value {given}")
    if pieces:
        link.set_pieces(kind, value.detach().reshape(-1))
    if kind == "fp32":
        link.set(kind, link.get(kind))  # the weights of all ranks follow, and masters are what they are
