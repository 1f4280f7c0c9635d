"""Questions and actions while a backward pass runs."""

import torch

from deepspeed._compat import backward_id
from deepspeed._native import _C


def count_used_parameters_in_backward(parameters):
    """The number of parameters that will get a gradient from the backward pass that is running.

    To be called from a hook. Parameters that want no gradient count as unused.

    Raises:
        RuntimeError: no backward pass is running on this thread.
    """
    wanting = [p for p in parameters if p.requires_grad]
    with torch.enable_grad():
        accumulators = [p.expand_as(p).grad_fn.next_functions[0][0] for p in wanting]
    try:
        return sum(torch._C._will_engine_execute_node(node) for node in accumulators)
    except RuntimeError as error:
        raise RuntimeError(
            "count_used_parameters_in_backward asks about the backward pass that is running, and none is: call it from "
            "a hook on a tensor."
        ) from error


class OutputHooks:
    """Hooks on the outputs of a forward pass; ``remove()`` takes them off."""

    def __init__(self, once, per_tensor):
        self._once = once
        self._per_tensor = per_tensor
        self._handles = []
        self._backward = None  # the pass for which `once` has been called
        self._fired = set()  # outputs whose gradient this pass has brought

    def add(self, tensor):
        index = len(self._handles)
        self._handles.append(tensor.register_hook(lambda grad: self._on_grad(index, grad)))

    def _on_grad(self, index, grad):
        # Without numbers, an output that comes a second time shows that a new pass has begun.
        current = backward_id()
        if not self._fired or current != self._backward or (current is None and index in self._fired):
            self._backward = current
            self._fired.clear()
            torch.autograd.Variable._execution_engine.queue_callback(self._fired.clear)
            self._once()
        self._fired.add(index)
        return None if self._per_tensor is None else self._per_tensor(grad)

    def remove(self):
        for handle in self._handles:
            handle.remove()
        self._handles = []


def register_output_backward_hooks(outputs, preprocess_once_fn, preprocess_per_tensor_fn=None):
    """Calls functions when a backward pass reaches the outputs of a forward pass, before it goes further.

    outputs:                  a tensor, or nested lists, tuples and dicts of them; those without gradient are left out.
    preprocess_once_fn:       called without arguments once per backward pass, at the first output it reaches.
    preprocess_per_tensor_fn: called with the gradient of each output; what it returns, unless None, replaces it.

    Returns an object whose ``remove()`` takes the hooks off.
    """
    hooks = OutputHooks(preprocess_once_fn, preprocess_per_tensor_fn)
    for tensor in _C.tensors_in(outputs):
        if tensor.requires_grad:
            hooks.add(tensor)
    return hooks
