"""One update of Muon as a function (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks")."""

import torch

from deepspeed._native import _C

# Variants of the Newton-Schulz iteration; see csrc/zero/step/newton_schulz.h.
NS_METHODS = ("gram", "standard")


def check_ns_method(method):
    """Raises ValueError for a method that does not exist."""
    if method not in NS_METHODS:
        raise ValueError(f"Muon: ns_method must be one of {', '.join(NS_METHODS)}, got {method!r}.")


@torch.no_grad()
def muon_update(grad, momentum, beta=0.95, ns_steps=5, nesterov=True, ns_method="gram", is_expert_group=False):
    """The update that Muon subtracts from a weight, before the learning rate.

    Args:
        grad: the gradient, of two or more dimensions; the first is the rows, the others together the columns.
        momentum: of the same shape, updated in place: ``momentum += (1 - beta) * (grad - momentum)``.
        beta: of the momentum.
        ns_steps: steps of the Newton-Schulz iteration.
        nesterov: orthogonalise ``grad + beta * (momentum - grad)`` instead of the momentum.
        ns_method: "gram" iterates on the Gram matrix where that costs less, "standard" on the matrix itself.
        is_expert_group: the first dimension counts experts, each with a matrix of its own.

    Returns:
        the orthogonalised update times ``sqrt(max(1, rows / columns))``; shape and dtype of ``grad``.

    Raises:
        ValueError: too few dimensions, or an unknown method.
    """
    check_ns_method(ns_method)
    least = 3 if is_expert_group else 2
    if grad.dim() < least:
        raise ValueError(
            f"muon_update orthogonalises matrices: it takes tensors of at least {least} dimensions"
            f"{' for experts' if is_expert_group else ''}, got shape {tuple(grad.shape)}."
        )
    momentum.lerp_(grad.to(momentum.dtype), 1 - beta)
    update = torch.lerp(grad, momentum.to(grad.dtype), beta) if nesterov else momentum
    update = update.float().clone() if update.dtype == torch.float32 else update.float()
    for matrix in update if is_expert_group else [update]:
        _C.newton_schulz_(matrix, steps=ns_steps, gram=ns_method == "gram")
    return update.to(grad.dtype)
