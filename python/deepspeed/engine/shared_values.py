"""Tensors of a model that lie in the same memory as a parameter: buffers, frozen parameters.

An engine moves parameters that it trains into memory of its own. What shares memory with one of them goes along, so
that it has the new values after each step, as in a plain process.
"""

import torch

from deepspeed.zero.parameters.sharded_parameter import is_sharded


class SharedValues:
    """Tensors that share memory with the trained parameters of ``module``. ``trained``: these parameters. ``sharded``:
    every rank will hold slices alone."""

    problem = None  # why something cannot go on to share memory

    def __init__(self, module, trained, sharded):
        ids = set(map(id, trained))
        named = [*module.named_parameters(), *module.named_buffers()]
        # ``(first byte, end, name, tensor)``, by address.
        spans = sorted((_span(tensor, name) for name, tensor in named if _has_memory(tensor)), key=lambda one: one[:2])
        self._rows = []  # (the parameter, what shares its memory, how far behind its first element)
        open_spans = []
        for span in spans:
            open_spans = [other for other in open_spans if other[1] > span[0]]
            for other in open_spans:
                pair = [one for one in (other, span) if id(one[3]) in ids]
                if pair and _overlap(other[3], span[3]):
                    rest = [one for one in (other, span) if one not in pair]
                    self._add(pair, rest, sharded)
            open_spans.append(span)

    def _add(self, pair, rest, sharded):
        name, param = pair[0][2:]
        other, tensor = (rest or pair[1:])[0][2:]
        if len(pair) > 1:
            self.problem = (
                f"the parameters '{name}' and '{other}' share memory, and both are trained: an engine keeps them "
                "apart. Make them one parameter, which is trained with the sum of both gradients "
                f"(the module of '{other}' gets the same torch.nn.Parameter object), or give one memory of its own"
            )
            return
        behind = tensor.data_ptr() - param.data_ptr()
        inside = behind >= 0 and _span(tensor, other)[1] <= _span(param, name)[1] and tensor.dtype == param.dtype
        if sharded or not inside or not param.is_contiguous():
            why = (
                "ZeRO stage 3 keeps slices of it"
                if sharded
                else "it reaches beyond that parameter"
                if not inside
                else "the parameter is not contiguous"
            )
            self.problem = (
                f"'{other}' shares memory with the parameter '{name}', which is trained, and would not follow it: "
                f"{why}. Give it memory of its own (clone()), or compute it from the parameter in forward"
            )
            return
        self._rows.append((param, tensor, behind // param.element_size()))

    def refuse(self):
        """Before anything is trained, raises ValueError for what would not follow; what is only run has its values."""
        if self.problem is not None:
            raise ValueError(self.problem)

    @torch.no_grad()
    def share(self):
        """After parameters have moved: what shared their memory does so again."""
        for param, tensor, behind in self._rows:
            data = param.data
            home = torch.empty(0, dtype=data.dtype, device=data.device)
            home.set_(data.storage(), data.storage_offset() + behind, tensor.shape, tensor.stride())
            tensor.data = home


def _has_memory(tensor):
    return not is_sharded(tensor) and tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def _span(tensor, name):
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size(), name, tensor


def _overlap(one, other):
    """Whether two tensors whose spans overlap have an element in common: columns of one matrix have none."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    begin, size = min(one.data_ptr(), other.data_ptr()), one.element_size()
    if size != other.element_size():
        return True
    places = []
    for tensor in (one, other):
        offset, found = (tensor.data_ptr() - begin) // size, torch.zeros((), dtype=torch.int64)
        for extent, stride in zip(tensor.shape, tensor.stride()):
            found = found.unsqueeze(-1) + torch.arange(extent) * stride
        places.append(found.reshape(-1) + offset)
    both = torch.cat([place.unique() for place in places])
    return both.unique().numel() < both.numel()
