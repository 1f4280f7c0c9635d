"""The frame of losses for causal language modelling that take the place of a transformers model's ``loss_function``."""

import torch

from deepspeed.sequence.loss import IGNORED

_REDUCTIONS = ("none", "mean", "sum")


def check_reduction(reduction):
    """ValueError for another ``reduction`` than those of ``torch.nn.functional.cross_entropy``."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; it must be one of {', '.join(_REDUCTIONS)}")


class CausalLMLoss:
    """A ``loss_function``; classes derived from it have ``_loss(logits, labels, ignore_index, reduction)``."""

    def __call__(
        self,
        logits,
        labels,
        vocab_size=None,
        num_items_in_batch=None,
        ignore_index=IGNORED,
        shift_labels=None,
        **kwargs,
    ):
        """``logits``: ``[batch, sequence, words]``; ``labels``: ``[batch, sequence]``, which are shifted by one here;
        ``shift_labels``: labels that are shifted already. ``num_items_in_batch``: divides the sum of the losses;
        without it the result is the mean over the tokens that count."""
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = self._loss(logits, shift_labels.to(logits.device), ignore_index, reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def install_loss(model, loss):
    """Gives the transformers model ``model`` this ``loss_function``, and returns the model. ValueError for a model that
    has none."""
    inner = getattr(model, "module", model)
    if not hasattr(inner, "loss_function"):
        raise ValueError(
            f"{type(inner).__name__} has no loss_function to replace: models of transformers have one from 4.46 on"
        )
    inner.loss_function = loss
    return model
