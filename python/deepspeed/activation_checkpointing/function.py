"""The re-entrant checkpoint: a node of the graph whose backward runs forward again, and a backward inside."""

import torch

from deepspeed.activation_checkpointing.keep import bring_back, keep
from deepspeed.activation_checkpointing.segment import BACKWARD_TIMER, Call, timed
from deepspeed.activation_checkpointing.tensors import extract_tensors, fill, flatten, merge_tensors


class CheckpointFunction(torch.autograd.Function):
    """``apply(run_function, all_outputs, *args)``: the outputs of ``run_function(*args)`` as a tuple of tensors, each
    tensor once. ``all_outputs`` is a list to which all outputs are appended, also those that are no tensors.

    Tensors inside of lists, tuples and dicts of ``args`` get no gradient here; ``checkpoint`` takes them out first.
    """

    @staticmethod
    def forward(ctx, run_function, all_outputs, *args):
        call = run_function if isinstance(run_function, Call) else Call.positional(run_function, args)
        ctx.call = call
        ctx.set_materialize_grads(False)
        # Before the segment runs: it may change its inputs in place, and copies overlap with it.
        kept, ctx.others, ctx.flags = extract_tensors(keep(args))
        ctx.save_for_backward(*kept)
        del kept
        outputs = call.first()
        call.output_template, tensors = flatten(outputs)
        ctx.count = len(tensors)
        all_outputs.extend(outputs if isinstance(outputs, tuple) else [outputs])
        return tuple(_fresh(tensor, args) for tensor in tensors) or (torch.empty(0),)

    @staticmethod
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "a re-entrant checkpoint cannot compute gradients for chosen inputs only (torch.autograd.grad, or "
                "backward(inputs=...)): call loss.backward(), or use non_reentrant_checkpoint."
            )
        if torch.is_grad_enabled():  # autograd enables gradients here for create_graph
            raise RuntimeError(
                "a re-entrant checkpoint has no second derivatives (backward with create_graph=True), since the "
                "backward inside of it leaves no graph: use non_reentrant_checkpoint."
            )
        inputs = bring_back(merge_tensors(ctx.saved_tensors, ctx.others, ctx.flags))
        detached = [
            one.detach().requires_grad_(wanted) if torch.is_tensor(one) else one
            for one, wanted in zip(inputs, ctx.needs_input_grad[2:])
        ]
        del inputs
        _, outputs = flatten(ctx.call.again(detached))
        if len(outputs) != ctx.count:
            raise RuntimeError(
                f"the checkpointed {ctx.call.name} returned {ctx.count} tensors in forward and {len(outputs)} when it "
                f"ran again for backward: it must do the same both times."
            )
        pairs = [(out, grad) for out, grad in zip(outputs, grads) if grad is not None and out.requires_grad]
        del outputs
        if pairs:
            with timed(BACKWARD_TIMER):
                torch.autograd.backward(*map(list, zip(*pairs)))
        return (None, None, *(one.grad if torch.is_tensor(one) else None for one in detached))


def _fresh(tensor, inputs):
    """An output that autograd may make part of the graph in place. The function may have returned a tensor that existed
    before (a buffer, a constant, a parameter), which must not change."""
    if any(tensor is one for one in inputs) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return tensor  # autograd handles inputs itself
    # Views stay views, so that changing one of two that overlap remains an error; .data is none.
    return tensor.detach() if tensor._is_view() or tensor.requires_grad else tensor.data


def run(call):
    """The outputs of ``call`` from a node that recomputes them, in the structure that the function returned."""
    args = list(call.tensors)
    if not any(tensor.requires_grad for tensor in args):
        # Parameters inside of the function want gradients even if no input does: without an input that requires one
        # the node would not be part of the graph, and they would silently get none.
        args.append(torch.empty(0, requires_grad=True))
    outputs = CheckpointFunction.apply(call, [], *args)  # it makes the template
    return fill(call.output_template, outputs)
