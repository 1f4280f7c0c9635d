"""One plain PyTorch process: what engines on many ranks are compared with."""

import copy
import functools

import torch


def reduced_mean(parts):
    """The mean over ranks of 16-bit gradients, as the engine forms it where nothing accumulates: each rank multiplies
    its own by 1/N and rounds, what comes out is added up in fp32, in rank order, and the sum is rounded."""
    dtype = parts[0].dtype
    return sum((part.float() * (1.0 / len(parts))).to(dtype).float() for part in parts).to(dtype)


def norm_of(grads):
    """The 2-norm of all gradients together, in fp64: they may have several types."""
    norms = [(grad.coalesce().values() if grad.is_sparse else grad).double().norm() for grad in grads]
    return float(torch.stack(norms).norm()) if norms else 0.0


class Plain:
    """Trains a copy of ``model`` on losses that the caller computes with ``self.model``.

    optimizer: a function of the parameters; what it returns has ``step()`` and reads ``.grad``.
    dtype: the type in which the model computes; None leaves its parameters as they are. fp64 is the default, so that
        what is measured is our error and not that of the reference: torch's own fp32 AdamW rounds
        ``1 - lr * weight_decay`` to fp32 and drifts by about 1.3e-6 of a parameter in 50 steps.
    masters: the optimizer steps copies in this type of all parameters that are narrower.
    clip: the norm to which gradients are clipped; 0 means never.
    scale: the loss scale.
    rounds: 16-bit gradients are averaged as ``reduced_mean`` does it, not added up in the masters' type.
    zeros: trained parameters without a gradient get a gradient of zeros.
    sparse: sparse gradients reach the optimizer as they are.
    schedule: a function of the optimizer that makes a learning-rate schedule.
    copied: False trains ``model`` itself.

    ``losses``, ``norms`` and ``grads`` have an entry for each step: the list of losses, the norm of the gradients, and
    the gradients by name, before they are clipped.
    """

    def __init__(self, model, optimizer, dtype=torch.float64, masters=torch.float32, clip=0.0, scale=1.0, rounds=False,
                 zeros=False, sparse=False, schedule=None, copied=True):  # fmt: skip
        self.model = copy.deepcopy(model) if copied else model
        if dtype is not None:
            self.model.to(dtype)
        self.clip, self.scale, self.rounds, self.zeros, self.sparse = clip, scale, rounds, zeros, sparse
        self.params = dict(self.model.named_parameters())
        self.masters = {name: self._master(p, masters) for name, p in self.params.items()}
        self.optimizer = optimizer(list(self.masters.values()))
        self.schedule = schedule(self.optimizer) if schedule else None
        self.losses, self.norms, self.grads = [], [], []
        self.forget()

    @staticmethod
    def _master(param, dtype):
        wide = torch.promote_types(param.dtype, dtype)
        return param if param.dtype == wide else torch.nn.Parameter(param.detach().to(wide), param.requires_grad)

    def forget(self):
        """Drops the gradients since the last step."""
        self.parts, self._seen = {}, []
        for param in self.params.values():
            param.grad = None

    def add(self, *losses, share=1.0):
        """Adds the gradients of losses, each times ``share``, to those of the step. Returns the losses as numbers."""
        for number, loss in enumerate(losses):
            (loss * (share * self.scale)).backward(retain_graph=number + 1 < len(losses))
            self.collect()
        self._seen += [loss.item() for loss in losses]
        return self._seen[-len(losses) :]

    def collect(self):
        """Adds the gradients that a backward has left in the parameters."""
        for name, param in self.params.items():
            if param.grad is not None:
                self.parts.setdefault(name, []).append(param.grad)
                param.grad = None

    def sums(self):
        """name -> the gradient that the step has so far, in the type of the master."""
        found = {}
        for name, parts in self.parts.items():
            dtype = self.masters[name].dtype
            if parts[0].is_sparse and not self.sparse:
                parts = [part.to_dense() for part in parts]
            wide = [part.to(dtype) for part in parts]
            whole = reduced_mean(parts).to(dtype) if self.rounds else functools.reduce(torch.add, wide)
            found[name] = whole / self.scale
        return found

    def update(self, grads=None):
        """A step on ``grads`` by name; on what was added where they are None. Returns the norm of the gradients."""
        grads = self.sums() if grads is None else grads
        if self.zeros:
            trained = ((name, one) for name, one in self.masters.items() if one.requires_grad)
            grads = {name: grads.get(name, torch.zeros_like(one)) for name, one in trained}
        self.grads.append({name: grad.clone() for name, grad in grads.items()})
        self.losses.append(self._seen)
        self.norms.append(norm_of(grads.values()))
        factor = min(1.0, self.clip / (self.norms[-1] + 1e-6)) if self.clip else 1.0
        for name, master in self.masters.items():
            master.grad = grads[name] * factor if name in grads else None
        self.optimizer.step()
        if self.schedule:
            self.schedule.step()
        with torch.no_grad():
            for name, param in self.params.items():
                self.masters[name].grad = None
                if self.masters[name] is not param:
                    param.copy_(self.masters[name])
        self.forget()
        return self.norms[-1]

    def step(self, *losses, share=None):
        """A step on the mean of ``losses``, or on their sum times ``share``. Returns the losses as numbers."""
        self.add(*losses, share=self._share(len(losses), share))
        self.update()
        return self.losses[-1]

    def run(self, loss_at, steps, parts=1, share=None):
        """Takes ``steps``, each on ``loss_at(model, step, part)`` of all parts: a loss or several. Returns itself."""
        for step in steps:
            for part in range(parts):
                losses = loss_at(self.model, step, part)
                losses = losses if isinstance(losses, (list, tuple)) else [losses]
                self.add(*losses, share=self._share(parts, share))
            self.update()
        return self

    def _share(self, count, given):
        return given if given is not None else 1.0 if self.rounds else 1.0 / count

    @property
    def means(self):
        """The mean loss of each step."""
        return [sum(losses) / len(losses) for losses in self.losses]
