"""The audit: for some steps, what the engine did is done once more without sharding, and compared.

Gradients are caught where autograd hands them over, added up in fp64, and averaged over the ranks by plain
``torch.distributed``; norm and AdamW are computed from them in fp64 on whole tensors. The weights that each rank
computes with are compared with the masters. It costs some forty bytes for each parameter element on every rank, and a
few whole-model collectives for each step; when it is over, its hooks are gone.
"""

import torch

from deepspeed import comm as dist
from deepspeed.log import log_dist
from deepspeed.zero.sharded_parameter import is_sharded

_NARROW = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def _adam(weight, grad, states, args, step):
    """Kingma and Ba, "Adam" (2015), algorithm 1; Loshchilov and Hutter, "Decoupled Weight Decay" (2019)."""
    if not args["decoupled"]:
        grad = grad + args["weight_decay"] * weight
    first = args["beta1"] * states["exp_avg"] + (1 - args["beta1"]) * grad
    second = args["beta2"] * states["exp_avg_sq"] + (1 - args["beta2"]) * grad * grad
    if args["bias_correction"]:
        unbiased = first / (1 - args["beta1"] ** step)
        root = (second / (1 - args["beta2"] ** step)).sqrt() + args["eps"]
    else:
        unbiased, root = first, second.sqrt() + args["eps"]
    if args["decoupled"]:
        weight = weight * (1 - args["lr"] * args["weight_decay"])
    return weight - args["lr"] * unbiased / root


class AuditError(RuntimeError):
    """The engine's gradients, norm, update or weights are not those of a plain process."""


class Audit:
    """Compares the first ``steps`` optimizer steps of ``engine``. Any difference raises AuditError on every rank,
    naming the parameter, the rank and the figures."""

    def __init__(self, engine, steps):
        self.engine = engine
        self.steps = steps
        self.done = 0
        self.params = [param for group in engine.trained_groups for param in group]
        self.group_of = [index for index, group in enumerate(engine.trained_groups) for _ in group]
        self.sums = {}
        self.handles = [
            param.register_hook(self._catcher(index)) for index, param in enumerate(self.params) if param.requires_grad
        ]
        self.tolerance = max(
            [1e-5]
            + [
                8 * _NARROW[t]
                for t in {kind for p in self.params for kind in (p.dtype, engine.kept_grad_dtype(p))}
                | {engine.communication_data_type}
                if t in _NARROW
            ]
        )

    # ---- gradients -------------------------------------------------------------------------------------------
    def _catcher(self, index):
        def catch(grad):
            with torch.no_grad():
                whole = (grad.to_dense() if grad.is_sparse else grad).detach().double()
                if index in self.sums:
                    self.sums[index] += whole
                else:
                    self.sums[index] = whole.clone()

        return catch

    def forget(self):
        """Gradients have been thrown away."""
        self.sums.clear()

    def _name(self, index):
        return self.engine._param_names[index]

    def _mean_gradients(self):
        """``{index: fp64 gradient}`` averaged over the data-parallel ranks, for what any rank has."""
        group, world = self.engine.parallel.dp_group, self.engine.dp_world_size
        if world == 1:
            return dict(self.sums)
        used = torch.zeros(len(self.params), device=self.engine.device)
        for index in self.sums:
            used[index] = 1
        dist.all_reduce(used, group=group)
        found = {}
        for index, param in enumerate(self.params):
            if not used[index]:
                continue
            shape = param.ds_shape if is_sharded(param) else param.shape
            whole = self.sums.get(index)
            if whole is None:
                whole = torch.zeros(shape, dtype=torch.float64, device=self.engine.device)
            dist.all_reduce(whole, group=group)
            found[index] = whole / world if self.engine.gradient_average else whole
        return found

    def _fail(self, text):
        raise AuditError(f"[Rank {self.engine.global_rank}] audit of step {self.engine.global_steps}: {text}")

    def _compare(self, what, index, mine, reference, scale=None):
        """``mine`` against ``reference``, relative to the reference's norm (or ``scale``)."""
        gap = float((mine.double() - reference).norm())
        size = max(float(reference.norm()) if scale is None else scale, 1e-30)
        if gap <= self.tolerance * size or (gap != gap and not bool(reference.isfinite().all())):
            return
        flat = (mine.double() - reference).abs().reshape(-1)
        worst = int(flat.nan_to_num(nan=float("inf")).argmax())
        self._fail(
            f"{what} of parameter '{self._name(index)}' {tuple(reference.shape)} differs from the one computed without "
            f"sharding: relative 2-norm of the difference {gap / size:.3g} (allowed {self.tolerance:.1g}), norms "
            f"{float(mine.double().norm()):.6g} and {float(reference.norm()):.6g}, largest at element {worst}: "
            f"{float(mine.reshape(-1)[worst]):.6g} instead of {float(reference.reshape(-1)[worst]):.6g}"
        )

    # ---- one step -------------------------------------------------------------------------------------------
    @torch.no_grad()
    def before_step(self):
        """Gradients are reduced; nothing has been updated."""
        core = self.engine.core
        self.check_weights()
        self.expected = self._mean_gradients()
        total = 0.0
        for index in range(len(self.params)):
            mine = core.full("grad", 0, index)
            reference = self.expected.get(index)
            if (mine is None) != (reference is None):
                self._fail(
                    f"parameter '{self._name(index)}' has {'no' if mine is None else 'a'} gradient in the engine and "
                    f"{'none' if reference is None else 'one'} without sharding"
                )
            if mine is not None:
                self._compare("the gradient", index, mine, reference)
                if self.engine.parallel.counts_in_norm(self.params[index]):
                    total += float(reference.square().sum())
        self.norm = total**0.5 / self.engine.stepping.loss_scale
        self.scale = self.engine.stepping.loss_scale
        self.before = [core.full("master", 0, index).double() for index in range(len(self.params))]
        self.moments = None
        if self.engine.stepping.fused is not None:
            self.moments = [
                {
                    name: value.double()
                    for slot, name in enumerate(core.slot_names())
                    if (value := core.full("slot", slot, index)) is not None
                }
                for index in range(len(self.params))
            ]
            self.counts = core.steps().clone()

    @torch.no_grad()
    def after_step(self, stepped):
        """The update is done, or was skipped."""
        stepping = self.engine.stepping
        finite = self.norm == self.norm and self.norm != float("inf")
        if finite and self.engine.mp_world_size == 1:
            gap = abs(stepping.norm - self.norm)
            if gap > max(self.tolerance * self.norm, 1e-12):
                self._fail(f"the gradient norm is {stepping.norm:.8g}, without sharding {self.norm:.8g}")
        if not stepped:
            for index, before in enumerate(self.before):
                self._compare("after a skipped step the weight", index, self._master(index), before)
        elif self.moments is not None and finite:
            for index, grad in self.expected.items():
                updated = self._updated(index, grad)
                # What the rule makes of a difference between gradients, in the step that it adds to the weight.
                more = (self._magnification(index) - 1) * float((updated - self.before[index]).norm())
                scale = float(updated.norm()) + more
                self._compare("the updated weight", index, self._master(index), updated, scale=scale)
        self.check_weights()
        self.sums.clear()
        self.done += 1
        if self.done == self.steps:
            for handle in self.handles:
                handle.remove()
            log_dist(f"audit: {self.done} steps agree with a plain process", ranks=[0])

    @property
    def over(self):
        return self.done >= self.steps

    def _master(self, index):
        return self.engine.core.full("master", 0, index)

    def _magnification(self, index):
        optimizer = self.engine.basic_optimizer
        return optimizer.magnification(optimizer.param_groups[self.group_of[index]])

    def _updated(self, index, grad):
        """The weight after one step of the optimizer with the fp64 gradient ``grad``, which is still scaled."""
        optimizer = self.engine.basic_optimizer
        group = optimizer.param_groups[self.group_of[index]]
        clip = self.engine.stepping.clip
        grad = grad / self.scale
        if clip > 0:
            grad = grad * min(1.0, clip / (self.norm + 1e-6))
        weight, states, step = self.before[index], self.moments[index], float(self.counts[index]) + 1
        if optimizer.rule_of(group) == "adam":
            return _adam(weight, grad, states, optimizer.rule_args(group), step)
        return optimizer.updated(group, weight, grad, states, step)

    @torch.no_grad()
    def check_weights(self):
        """Every rank computes with what the masters say. Every rank calls it."""
        problem = None
        for index, param in enumerate(self.params):
            master = self._master(index)
            if self.engine.dp_world_size > 1 and not self.engine.zero_optimization():
                dist.broadcast(master, self.engine.parallel.source_rank(), group=self.engine.parallel.dp_group)
            if is_sharded(param) and not param.ds_handle.status == 1:
                continue  # fetched from the shards when used; its shard is compared through the master
            mine, reference = param.detach(), master.to(param.dtype)
            if problem is None and not torch.equal(mine, reference):
                gap = float((mine.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))
                problem = (
                    f"the weights of parameter '{self._name(index)}' on rank {self.engine.global_rank} are not those "
                    f"of the masters: relative 2-norm of the difference {gap:.3g}. They are stale, or were changed "
                    "without deepspeed.zero.GatheredParameters or safe_set_full_fp32_param"
                )
        self._agree(problem)

    def _agree(self, problem):
        """Raises on every rank when one has a problem."""
        bad = torch.tensor([float(problem is not None)], device=self.engine.device)
        if self.engine.dp_world_size > 1:
            dist.all_reduce(bad, group=self.engine.parallel.dp_group)
        if problem is not None:
            self._fail(problem)
        if bad.item():
            self._fail("another rank computes with weights that are not those of the masters; it names the parameter")
