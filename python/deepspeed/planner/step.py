"""Runs training steps of the real engine in a ``World``, and says what they took."""

import collections
import itertools
import math
import traceback

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.checkpoint.save.save import expected_bytes
from deepspeed.engine.arguments import only_training
from deepspeed.engine.initialize import initialize
from deepspeed.ops.by_name import is_native
from deepspeed.planner.child import PlanError
from deepspeed.planner.known import KnownResults
from deepspeed.planner.operators import call_of
from deepspeed.planner.small_runs import run_small
from deepspeed.profiling.op_costs import CountedOps, is_view
from deepspeed.utils.fused_attention import FusedAttention
from deepspeed.zero.nested import replace, tensors_in

# Operators whose result, or its size, the host waits for.
_ASKED = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select", "repeat_interleave")
KINDS = ("grad", "master", "slots")
_OWNERS = {"lp": "parameters", "grad": "gradients", "master": "masters", "slot": "optimizer states"}


class FlagError(PlanError):
    """The forward of the model raised an error after it had asked for a flag, which was true."""


class Constants(TorchDispatchMode):
    """Values of meta tensors that the host asks for are constants: a number is 1, a flag ``known.flag``, others zeros.
    ``memory``: the count of meta tensors. ``known``: the ``KnownResults`` of earlier steps."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # nothing compiles here; torch 2 asks at every operator

    def __init__(self, memory, known=None):
        super().__init__()
        self.memory, self.known = memory, known or KnownResults()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        """An operator outside of the mode."""
        self.known.key = None
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].is_meta:
            kind = args[0].dtype
            self.known.asked |= kind is torch.bool
            return self.known.flag if kind is torch.bool else 1.0 if kind.is_floating_point else 1
        if name == "copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0]
        if name == "_to_copy" and args[0].is_meta and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs) if is_view(func) else self.known.run(func, args, kwargs, self._compute)

    def _compute(self, func, args, kwargs):
        """Tensors that torch makes to find the shapes of an operator on meta do not count; its results do."""
        owner = self.memory.set_owner("")
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, (NotImplementedError, TypeError)) and "meta" not in str(error):
                raise
            out = self._run_small(func, args, kwargs, error)
        finally:
            self.memory.set_owner(owner)
        for one in tensors_in(out):
            self.memory.adopt(one, owner)
        return out

    def _run_small(self, func, args, kwargs, error):
        found = run_small(func, args, kwargs)
        if found is None:
            raise NotImplementedError(
                f"{func} runs on tensors without memory neither in torch nor, with few rows, on the CPU: {error}"
            ) from error
        self.known.small.add(str(func))
        return found[0]


def _waits(name, args, kwargs):
    """Whether the host waits for the device in a call of an operator: it asks for values, or copies between the memory
    of the host and that of the device, and not in the background."""
    if name in _ASKED:
        return args[0].is_meta
    if name == "copy_":
        return args[0].is_meta != args[1].is_meta and not (args[2:] or [kwargs.get("non_blocking")])[0]
    if name == "_to_copy" and kwargs.get("device") is not None and not kwargs.get("non_blocking"):
        return args[0].is_meta != (torch.device(kwargs["device"]).type == "meta")
    return False


def on_meta(value):
    """``value`` with new meta tensors in place of its tensors, which require gradients where these do."""

    def made(one):
        return torch.empty_like(one, device="meta").requires_grad_(one.requires_grad)

    return replace(value, torch.is_tensor, made)


def arguments_in(sample):
    """``(arguments, keyword arguments)`` of a forward: a pair of them, a dict, a tuple of arguments, or one tensor."""
    if isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[0], tuple) and isinstance(sample[1], dict):
        return sample
    if isinstance(sample, dict):
        return (), sample
    return (sample if isinstance(sample, tuple) else (sample,)), {}


class _CountedConstants(CountedOps):
    """Both in one mode, because each mode costs time at every operator. Adds the time of each one to the clock of the
    world. ``calls``: those without a measured time yet, as ``call_of`` names them, where times are. ``not_measured``:
    names of operators that could not run alone, which take the time of the rates."""

    _should_skip_dynamo = Constants._should_skip_dynamo

    def __init__(self, world, known):
        super().__init__(self._take_time)
        self.world, self.calls, self._constants, self._call = world, {}, Constants(world.memory, known), None
        self.not_measured, self._runs = set(), world.clock.compute
        self._last, self._costs = None, {}  # ``(Cost, nanoseconds)`` of the last operation, and by their known keys

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.world.host.begins()
        out = self.count(func, args, kwargs or {})
        self.world.host.ends()
        return out

    def kernel_ran(self, name, out, *args):
        self.world.host.pause()
        self._runs = self.world.clock.kernel
        super().kernel_ran(name, out, *args)
        self._runs = self.world.clock.compute
        self.world.host.ends()

    def call(self, func, args, kwargs):
        self.world.clock.dispatched()
        if _waits(func.overloadpacket.__name__, args, kwargs):
            self.world.clock.host_waits(str(func))
        return self._constants.run(func, args, kwargs)

    def add(self, name, args, kwargs, out):
        known = self._constants.known
        key, known.key = known.key, None  # a kernel of this library has none
        if key in self._costs:
            cost, took = self._costs[key]
            self._sum(cost)
            if cost.flops or cost.bytes:
                self._runs(took, name)
            return
        if self.world.times is not None:
            self._call = call_of(name, args, kwargs)
        super().add(name, args, kwargs, out)
        if key is not None:
            self._costs[key] = self._last

    def _take_time(self, name, cost, operands, out):
        took = 0
        if cost.flops or cost.bytes:
            took, times = None, self.world.times
            if times is not None:
                took = times.get(self._call)
                if self._call not in times:
                    self.calls[self._call] = None
                elif took is None:
                    self.not_measured.add(name)
            if took is None:
                made = next((one for one in tensors_in([out]) if one.is_floating_point()), None)
                took = self.world.machine.time_of(name, cost, torch.float32 if made is None else made.dtype)
            self._runs(int(took), name)
        self._last = cost, int(took)


def own_states(engine):
    """Bytes of the states that an optimizer of torch keeps in tensors of its own."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if inner is None or is_native(inner):
        return 0
    states = [one for state in inner.state.values() for one in state.values() if torch.is_tensor(one) and one.dim()]
    return sum(one.numel() * one.element_size() for one in states)


def bytes_of_a_parameter(engine):
    """Bytes on the device of this rank in a step, for each parameter of its model: weights, gradients, masters and
    states."""
    rests = engine.core.storage.report()["media"]["device"]["resting_bytes"] + own_states(engine)
    rests += engine.core.absent_grad_bytes()
    return rests / max(1, sum(getattr(one, "ds_numel", one.numel()) for one in engine.module.parameters()))


class PlannedRun:
    """An engine in ``world`` for ``model``, which is on meta, and its steps with the micro-batch ``sample``.
    ``optimizer``: the caller's, a function of parameters, or None. ``mpu``: the caller's, or None."""

    def __init__(self, world, model, config, sample, loss, optimizer, mpu=None):
        self.world, self.sample, self.loss, self._known = world, sample, loss, KnownResults(world.flag)
        with Constants(world.memory, self._known):
            self.engine = initialize(model=model, config=only_training(config), optimizer=optimizer, mpu=mpu)[0]
        self.engine.tput_timer.start_step = 0  # the planned step is one of many

    def _inputs(self):
        args, kwargs = arguments_in(self.sample)
        return on_meta(args), on_meta(kwargs)

    @property
    def run_small(self):
        """Names of operators (``KnownResults.small``)."""
        return self._known.small

    def learn(self):
        """Training steps of which gathers and uses of gradients are learned: the first backward shows the order of
        gathers at stage 3, and the second one which of them nobody needs."""
        engine = self.engine
        backwards = 2 if engine.zero_optimization_partition_weights() else 1
        with FusedAttention(), Constants(self.world.memory, self._known):
            for _ in range(math.ceil(backwards / engine.gradient_accumulation_steps())):
                self._train()

    def _train(self):
        world, engine = self.world, self.engine
        world.at("forward")
        world.memory.reset_peak()
        for _ in range(engine.gradient_accumulation_steps()):
            world.at("forward")
            args, kwargs = self._inputs()
            loss = self._loss_of(args, kwargs)
            world.at("backward")
            engine.backward(loss)
            del loss, args, kwargs
            world.at("step")
            engine.step()

    def _loss_of(self, args, kwargs):
        try:
            return self.loss(self.engine(*args, **kwargs))
        except Exception as error:
            asked = self._known.asked
            if isinstance(error, (ValueError, PlanError)) and not asked:
                raise
            given = ", ".join(f"{one.dtype}{list(one.shape)}" for one in tensors_in((args, kwargs)))
            flags = " Flags that it asks for are true, or false where that is an error." if asked else ""
            raise (FlagError if asked and self._known.flag else PlanError)(
                f"with the sample {given} the forward of the model raises {type(error).__name__}: {error}. A sample is "
                f"the inputs of one micro-batch of a rank.{flags}\n{traceback.format_exc()}"
            ) from error

    def step(self):
        """One training step: what its operators cost, and the bytes that it has moved from and to each tier."""
        world = self.world
        world.calls()
        world.clock.reset()
        before = self._transferred()
        with FusedAttention(), _CountedConstants(world, self._known) as counted:
            world.host.turn(True)
            self._train()
            world.host.pause()
            world.host.turn(False)
        world.clock.end()
        moved = {tier: size - before.get(tier, 0) for tier, size in self._transferred().items()}
        if moved:
            moved["host"] += self._weights_sent()
        return counted, moved

    def waits(self):
        """Seconds that this rank waits for others beside its collectives."""
        return {}

    def _transferred(self):
        media = self.media()
        return {tier: one["read_bytes"] + one["written_bytes"] for tier, one in media.items()}

    def _weights_sent(self):
        """Bytes of new weights that an update on the host sends to the device."""
        offload = self.engine.zero_offload_param() if self.engine.zero_optimization_partition_weights() else None
        if offload is not None and offload.device != "none":
            return 0
        width = torch.empty((), dtype=self.engine.get_data_types()[0]).element_size()
        return sum(int(size // 4 * width * (1 - shares["device"])) for size, shares in self._planes("master"))

    def media(self):
        """The report of each tier of the engine's storage."""
        return self.engine.core.storage.report()["media"] if self.engine.core is not None else {}

    def checkpoint_bytes(self):
        return sum(expected_bytes(self.engine._checkpoints.run_state()))

    def _planes(self, kind):
        """``(bytes, shares that rest in each tier)`` of the planes of a kind (``KINDS``)."""
        core = self.engine.core
        for plane, size in core.planes(kind) if core is not None else ():
            placement, shares = core.storage.placement(plane), dict.fromkeys(("device", "host", "file"), 0.0)
            if placement.rest != "device":
                shares[placement.rest] += placement.rest_share
                shares["file"] += placement.file_share
            yield size, {**shares, "device": 1.0 - shares["host"] - shares["file"]}

    def shares_of(self, kind):
        """The shares of gradients, masters or optimizer states that rest in each tier; all on the device where the
        engine keeps none."""
        return next((shares for _, shares in self._planes(kind)), {"device": 1.0, "host": 0.0, "file": 0.0})

    def update_seconds(self, moved):
        """The least time of the update: every state is read and written where it is worked on, while the ``moved``
        bytes of a step travel between the tiers."""
        machine, works = self.world.machine, 0.0
        for size, shares in itertools.chain.from_iterable(map(self._planes, KINDS)):
            here = shares["device"]
            for share, rate in ((here, machine.memory), (1 - here, machine.host_step)):
                works += 2 * share * size / rate if rate else 0.0
        sharing = min(self.world.size, machine.ranks_of_host or self.world.size)  # ranks of a host have one drive
        rates = {"host": machine.host, "file": machine.file / sharing}
        return max(works, *(size / rates[tier] for tier, size in moved.items() if rates.get(tier)), 0.0)


def owner_of(plane):
    """A word of the report for what the memory belongs to: a plane of the engine, or a kind of tensors."""
    found = next((word for part, word in _OWNERS.items() if part in plane), None)
    return found or plane


def by_owner(owned):
    """Bytes by words of the report."""
    made = collections.Counter()
    for plane, size in owned.items():
        made[owner_of(plane)] += size
    return {owner: size for owner, size in made.items() if size > 0}
