"""Runs a saved step again in this process: the micro-batches of each data-parallel rank, one rank after the other."""

import itertools
import time
import types

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.read.weights import restore
from deepspeed.diagnosis.bundle import BundleError, described
from deepspeed.host.user_files import function_in_file
from deepspeed.zero.nested import cast_floats, loss_in, move_to_device, tensors_in

_NARROW = (torch.float16, torch.bfloat16)


def function_of(target, option):
    """The function that ``FILE.py:name`` names."""
    try:
        return function_in_file(target)
    except ValueError as error:
        raise BundleError(f"{option} {target}: there is no such file or function: {error}") from None


def forward_loss(model, *inputs, **kwargs):
    """The loss of a micro-batch, where ``--step`` names no other function: ``loss`` of what the model returns, or its
    first tensor of one element."""
    loss = loss_in(model(*inputs, **kwargs))
    if loss is None or loss.numel() != 1:
        raise BundleError(
            "the model does not return its loss: name a function of (model, arguments of forward, values of "
            "engine.keep_for_postmortem) that does, with --step FILE.py:function"
        )
    return loss


def check(bundle):
    """Refuses a bundle that cannot be run again."""
    if bundle.refusal is not None:
        raise BundleError(f"{bundle.folder} is shown and not replayed: {bundle.refusal}")


def check_inputs(content):
    for one in content["micro_batches"]:
        if "<not saved: " in (given := described((one["inputs"], one["kwargs"], one["more"]))):
            raise BundleError(f"forward had arguments that are neither tensors nor plain values: {given}")


def check_names(names, content):
    if differ := sorted(names ^ content["weights"].keys()):
        raise BundleError(f"--model makes another model: parameter {differ[0]!r} is not in both, it and the bundle")


def trained(content, micro_batches):
    """Those of a rank that its step has trained on, or was about to."""
    found = [one for one in micro_batches if one["loss"] is not None] if content["error"] is None else ()
    return found or micro_batches


def loss_of(step, model, one, device, dtype, made):
    """The loss of a micro-batch with the random numbers that it had."""
    given = move_to_device((one["inputs"], one["kwargs"], one["more"]), device)
    inputs, kwargs, more = given if dtype is None else cast_floats(given, dtype)
    restore(one["rng"])
    loss = step(model, *inputs, *(() if step is forward_loss else more), **kwargs)
    made.losses.append(loss.item())
    see(made, loss, "the loss", "")
    return loss


class Replay:
    """The model of a bundle, and passes of its ranks."""

    def __init__(self, bundle, factory, step=forward_loss):
        check(bundle)
        self.bundle, self.step, self.model = bundle, step, factory()
        self.params, self.buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        self.shapes = {name: param.shape for name, param in self.params.items()}
        check_names(self.params, bundle.first)
        accelerator = get_accelerator()
        self.device = "cpu" if accelerator.device_name() == "cpu" else accelerator.current_device_name()
        torch.set_num_threads(bundle.first["machine"]["threads"])

    def _weight(self, rank, name):
        """A whole weight as the rank computes with it: at ZeRO stage 3 of the pieces of all ranks."""
        shape, content = self.shapes[name], self.bundle.ranks[rank]
        own = content["weights"][name][1]
        if own.numel() < shape.numel():
            known = [self.bundle.ranks[other]["weights"] for other in content["dp_ranks"]]
            pieces = [weights[name] for weights in known if name in weights]
            own = torch.full((shape.numel(),), float("nan"), dtype=own.dtype)
            for begin, piece in pieces:
                own[begin : begin + piece.numel()] = piece.reshape(-1)[: max(0, own.numel() - begin)]
        if own.numel() != shape.numel():
            raise BundleError(
                f"--model makes another model: {name!r} has the shape {tuple(shape)}, not {described(own)}"
            )
        return own.reshape(shape).clone()

    def run(self, rank, others=False, dtype=None):
        """Forward and backward of a rank's micro-batches, or of ``others`` that did no harm, in ``dtype`` in place of
        the type of the run. ``losses``: of each. ``gradients``: for each reduction a dict name -> sum, with loss scale.
        ``first``: of the first tensor that is inf or nan a text, its module and the time; or None. ``error``: what was
        raised, as a text, or None."""
        made, content = (
            types.SimpleNamespace(losses=[], gradients=[{}], first=None, error=None),
            self.bundle.ranks[rank],
        )
        check_inputs(content)
        for name, param in self.params.items():
            weight = self._weight(rank, name)
            param.data, param.grad = (weight if dtype is None else weight.to(dtype)).to(self.device), None
        for name, buffer in self.buffers.items():
            buffer.data = content["buffers"].get(name, buffer).clone().to(self.device)
        for name, module in self.model.named_modules():
            module.training = name not in content["in_eval"]
        handles = watch(self.model, made)
        try:
            for one in trained(content, self._others(rank) if others else content["micro_batches"]):
                self._micro_step(content, one, dtype, made)
        except BundleError:
            raise
        except Exception as error:  # the model's own
            made.error = f"{type(error).__name__}: {error}"
        finally:
            for handle in handles:
                handle.remove()
        return made

    def _others(self, rank):
        """Micro-batches of the step before; else those before the last one in this step; else those of other ranks."""
        content = self.bundle.ranks[rank]
        elsewhere = [one for each in self.bundle.ranks.values() if each is not content for one in each["micro_batches"]]
        return content["before"] or content["micro_batches"][:-1] or elsewhere

    def _micro_step(self, content, one, dtype, made):
        loss = loss_of(self.step, self.model, one, self.device, dtype, made)
        scale, parts = content["loss_scale"] if dtype is None else 1.0, one.get("parts", 1)
        root = loss / parts if parts > 1 else loss
        (root.float() * scale if scale != 1.0 else root).backward()
        if content["reduces_each"] and made.gradients[-1]:
            made.gradients.append({})
        sums = made.gradients[-1]
        for name, param in self.params.items():
            if param.grad is not None:
                grad, param.grad = param.grad.to_dense() if param.grad.is_sparse else param.grad, None
                grad = grad.float() if grad.dtype in _NARROW else grad
                sums[name] = sums[name] + grad if name in sums else grad

    def figures(self, passes):
        """Returns one dict for each rank: (name, offset, numel) -> (2-norm, sum) of the pieces of the gradients that
        ``passes`` make."""
        reduced, made = self._reduced(passes.values()), {}
        for rank, content in self.bundle.ranks.items():
            made[rank] = {}
            for name, begin, numel in content["gradients"] if reduced else ():
                whole = reduced.get(name, torch.zeros(begin + numel))
                piece = whole.reshape(-1)[begin : begin + numel].double()
                made[rank][name, begin, numel] = piece.norm().item(), piece.sum().item()
        return made

    def _reduced(self, passes):
        """name -> the gradient that the ranks share: the sum or the mean over all ``passes``."""
        before, reduced = self.bundle.first["before_sum"], {}
        after = 1.0 / (before * (len(passes) if self.bundle.first["average"] else 1))
        for of_ranks in itertools.zip_longest(*(one.gradients for one in passes), fillvalue={}):  # as the engine adds
            total = {}
            for name, grad in (pair for sums in of_ranks for pair in sums.items()):
                total[name] = total[name] + grad * before if name in total else grad * before
            for name, grad in total.items():
                reduced[name] = reduced[name] + grad * after if name in reduced else grad * after
        return reduced


# ---- the first tensor that is not finite -----------------------------------------------------------------------------
def bad_kind(tensor, masks=False):
    """ "nan", "inf", or None where all of it is finite. ``masks``: -inf is no fault, as attention masks have it."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return None
    if bool(torch.isnan(tensor).any()):
        return "nan"
    return None if masks and not bool((tensor == torch.inf).any()) else "inf"


def see(made, value, what, module, masks=False):
    for tensor in tensors_in(value) if made.first is None else ():
        if kind := bad_kind(tensor, masks):
            made.first = f"{what} is {kind}", module, time.monotonic()


def watch(model, made):
    """Hooks that find it, in the order in which tensors are computed. Those of a module run after those inside."""
    handles = []
    for name, module in model.named_modules():

        def after(module, inputs, output, name=name):
            see(made, inputs, f"an input of '{name}'", name, masks=True)
            see(made, output, f"the output of '{name}'", name, masks=True)
            for tensor in (one for one in tensors_in(output) if one.requires_grad):
                tensor.register_hook(lambda grad: see(made, grad, f"the gradient of the output of '{name}'", name))

        handles.append(module.register_forward_hook(after))
    for name, param in model.named_parameters():
        if param.requires_grad:
            about = f"the gradient of '{name}'", name.rpartition(".")[0]
            handles.append(param.register_hook(lambda grad, about=about: see(made, grad, *about)))
    return handles
