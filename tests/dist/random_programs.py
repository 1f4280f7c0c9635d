"""Random training programs: what an engine does beside what plain PyTorch does in the same program.

A program is a configuration and a list of operations, plain values both, made of a seed. ``run_programs`` runs it on
every rank with an engine and, in the same process, with a plain model on the batches of all ranks. After each step,
load and evaluation the two are compared. ``shrunk`` makes a failing program shorter for as long as it fails.
"""

import copy
import functools
import os
import random
import time

import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.log import logger
from deepspeed.utils import safe_get_full_fp32_param
from models import Parts, seeded
from plain import Plain
from refusals import refused
from runs import engine_of

ROWS = 4


def forward_net(net, x, extra=False, fails=False, writes=None):
    """``writes``: a factor and a summand with which forward changes two of its weights."""
    if writes is not None:
        with torch.no_grad():
            net.scale.mul_(writes[0]).add_(writes[1])
            net.middle.weight.data.mul_(writes[0])
    hidden = torch.tanh(net.first(x.to(net.first.weight.dtype)))
    hidden = torch.tanh(net.tied(torch.tanh(net.middle(hidden)))) * net.scale
    if fails:
        raise ArithmeticError("the forward of this batch fails")
    if extra:
        hidden = hidden + torch.tanh(net.sometimes(hidden))
    return net.last(hidden)


def net():
    """A tied weight, a layer that only some batches use, an extra vector, and an error on request."""
    net = Parts(
        forward_net,
        first=torch.nn.Linear(6, 8),
        middle=torch.nn.Linear(8, 8),
        tied=torch.nn.Linear(8, 8, bias=False),
        sometimes=torch.nn.Linear(8, 8),
        scale=torch.nn.Parameter(torch.ones(8)),
        last=torch.nn.Linear(8, 3),
    )
    net.tied.weight = net.middle.weight
    return net


def batch(number, rank):
    generator = torch.Generator().manual_seed(7919 * number + rank)
    device = deepspeed.get_accelerator().current_device_name()
    x, target = (torch.randn(ROWS, width, generator=generator).to(device) for width in (6, 3))
    return x, target, number % 3 == 0


def loss_of(output, target):
    return torch.nn.functional.mse_loss(output.float(), target)


# ---- programs ------------------------------------------------------------------------------------------------------
PARAMS = [name for name, _ in net().named_parameters()]
OPERATIONS = {
    "train": 10,  # forward, backward and engine.step()
    "forward": 1,  # without a backward
    "evaluate": 2,
    "fail": 1,  # an error in forward
    "write": 3,  # param.mul_().add_()
    "rank0": 2,  # the same inside GatheredParameters(modifier_rank=0), on rank 0 alone
    "unasked": 2,  # the same on all ranks, without modifier_rank
    "behind": 1,  # the same through param.data
    "slice": 2,  # each rank writes its slice, and no rank waits
    "inside": 2,  # forward writes into its weights
    "again": 1,  # another deepspeed.initialize while the engine lives
    "data": 2,  # param.data = tensor
    "swap": 1,  # the same for an evaluation, and back
    "vector": 1,  # vector_to_parameters
    "load": 1,  # module.load_state_dict
    "assign": 1,  # the same with new parameters in place of the old ones
    "wrong": 1,  # param.data = a tensor of another shape: an error
    "dtype": 1,  # module.double() and back
    "freeze": 2,  # param.requires_grad_(False), or True
    "forget": 1,  # engine.zero_grad()
    "save": 1,
    "restore": 1,
}


def program_of(seed):
    """``(configuration, operations)`` of a seed."""
    choose = random.Random(seed)
    stage, world = choose.randrange(4), choose.choice([1, 1, 1, 2])
    dtype = choose.choice(["fp32", "fp32", "bf16"])
    offload = choose.choice([None, None, "cpu", "nvme"]) if stage > 0 else None
    optimizer = choose.choice(["AdamW", "SGD"]) if offload is None else "AdamW"
    made = {
        "stage": stage,
        "world": world,
        "dtype": dtype,
        "offload": offload,
        "optimizer": optimizer,
        "accumulate": choose.choice([1, 1, 2, 3]),
        "clip": choose.choice([0.0, 0.2]),
        "persist": choose.choice([0, 100000]),
        "plain_backward": choose.random() < 0.3,
    }
    operations = []
    for _ in range(choose.randint(6, 16)):
        name = choose.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        operations.append((name, choose.randrange(1000)))
    # Whatever was done last is followed by steps that would show it.
    return made, operations + [("train", choose.randrange(1000)) for _ in range(made["accumulate"] + 1)]


# Keys with which ranks gather something else than slices.
COPIES = {
    "hpZ": {"zero_hpz_partition_size": 2},
    "qwZ": {"zero_quantized_weights": True},
    "both": {"zero_hpz_partition_size": 2, "zero_quantized_weights": True},
}


def program_with_copies(seed):
    """The same at stage 3 of four ranks, one of which has no element of the smallest parameter."""
    made, operations = program_of(seed)
    return {**made, "stage": 3, "world": 4, "copies": list(COPIES)[seed % len(COPIES)]}, operations


def config_of(made, folder):
    zero = {"stage": made["stage"], "stage3_param_persistence_threshold": made["persist"]}
    zero.update(COPIES.get(made.get("copies"), {}))
    if made["offload"] is not None:
        zero["offload_optimizer"] = {"device": made["offload"], "nvme_path": folder}
    params = {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.01}
    if made["optimizer"] == "SGD":
        params = {"lr": 0.05, "momentum": 0.9}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": made["accumulate"],
        "gradient_clipping": made["clip"],
        "optimizer": {"type": made["optimizer"], "params": params},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": made["dtype"] == "bf16"},
    }


# ---- plain PyTorch -------------------------------------------------------------------------------------------------
class PlainProgram(Plain):
    """The model with fp32 masters, which computes in the type of the program."""

    def __init__(self, model, made):
        kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[made["optimizer"]]
        narrow = torch.bfloat16 if made["dtype"] == "bf16" else None
        params = config_of(made, None)["optimizer"]["params"]
        super().__init__(model, functools.partial(kind, **params), narrow, clip=made["clip"])
        self.made, self.make = made, functools.partial(kind, list(self.masters.values()), **params)
        self.start_again()

    def start_again(self):
        """Another engine makes its masters of the weights, and trains all of them."""
        for name, param in self.params.items():
            param.requires_grad_(True)
            self.masters[name].requires_grad_(True)
            self.become(name, param)
        self.optimizer = self.make()
        self.count, self.saved = 0, None
        self.forget()

    @torch.no_grad()
    def become(self, name, master):
        self.masters[name].copy_(master)
        self.params[name].copy_(master)

    @torch.no_grad()
    def put(self, name, value):
        """The value of a weight; an element whose narrow weight stays keeps what is behind it."""
        param = self.params[name]
        value = value.to(param.dtype)
        self.become(name, torch.where(param == value, self.masters[name], value.float()))

    def weight(self, name):
        return self.params[name].detach().clone()

    def train(self, number):
        for rank in range(self.made["world"]):
            x, target, extra = batch(number, rank)
            self.add(loss_of(self.model(x, extra), target), share=1 / (self.made["accumulate"] * self.made["world"]))
        self.count += 1
        if self.count % self.made["accumulate"]:
            return False
        self.update()
        return True

    def save(self):
        self.saved = copy.deepcopy((self.masters, self.optimizer.state_dict(), self.count))

    def restore(self):
        masters, optimizer, self.count = copy.deepcopy(self.saved)
        for name, master in masters.items():
            self.become(name, master)
        self.optimizer.load_state_dict(optimizer)
        self.forget()


# ---- both ----------------------------------------------------------------------------------------------------------
class Run:
    """One program on this rank."""

    def __init__(self, rank, made, folder):
        self.rank, self.made, self.folder = rank, made, folder
        os.makedirs(folder, exist_ok=True)
        self.engine = engine_of(seeded(net, seed=3), config_of(made, folder))
        self.plain = PlainProgram(seeded(net, seed=3).to(self.engine.device), made)
        self.params = dict(self.engine.module.named_parameters())
        self.sharded = made["stage"] == 3
        # Whole weights that are not the masters: the next step writes over what param.data has written in place.
        self.apart = not self.sharded and (made["dtype"] == "bf16" or made["offload"] is not None)
        # Masters of 16-bit weights are compared with sums that PyTorch rounds elsewhere.
        self.tolerance = 4e-2 if made["dtype"] == "bf16" else 2e-4
        if made.get("copies") in ("qwZ", "both"):  # the model computes with decoded weights
            self.tolerance = 0.15

    def run(self, operations):
        for name, number in operations:
            self.operation = (name, number)
            getattr(self, name)(number)
        self.engine.destroy()

    # ---- comparing
    def compare(self, what, ours, expected):
        ours, expected = ours.detach().float().cpu(), expected.detach().float().cpu()
        assert ours.shape == expected.shape, f"{what}: {tuple(ours.shape)} for {tuple(expected.shape)}"
        gap = (ours - expected).abs().max().item() if ours.numel() else 0.0
        limit = self.tolerance * max(1.0, expected.abs().max().item())
        assert gap <= limit, f"{what} after {self.operation}: off by {gap:.3g}, limit {limit:.3g}"

    def compare_all(self):
        for name, param in self.params.items():
            self.compare(f"the master of {name}", safe_get_full_fp32_param(param), self.plain.masters[name])
        with deepspeed.zero.GatheredParameters(list(self.params.values())):
            for name, param in self.params.items():
                self.compare(f"the weight {name}", param, self.plain.masters[name])
        assert list(dict(self.engine.module.named_parameters())) == PARAMS

    # ---- training
    def train(self, number):
        engine = self.engine
        x, target, extra = batch(number, self.rank)
        loss = loss_of(engine(x, extra), target)
        if self.made["plain_backward"]:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
        if self.plain.train(number):
            self.compare_all()

    def forward(self, number):
        x, _, extra = batch(number, self.rank)
        self.engine(x, extra)

    def fail(self, number):
        refused(ArithmeticError, "fails", self.engine, batch(number, self.rank)[0], fails=True)

    def evaluate(self, number):
        x, _, extra = batch(number, self.rank)
        self.engine.eval()
        with torch.no_grad():
            ours, expected = self.engine(x, extra), self.plain.model(x, extra)
        self.engine.train()
        self.compare("the output", ours, expected)

    def forget(self, number):
        self.engine.zero_grad()
        self.plain.forget()

    # ---- writing
    def chosen(self, number):
        name = PARAMS[number % len(PARAMS)]
        return name, self.params[name], 0.5 + (number % 7) / 8, (number % 5 - 2) / 8

    def gathered(self, params):
        """The place where the user may write: at stage 3 inside the context."""
        params = params if self.sharded else []
        return deepspeed.zero.GatheredParameters(params, modifier_rank=0 if params else None)

    def write(self, number):
        name, param, factor, more = self.chosen(number)
        direct = not self.sharded or (param.ds_persist and number % 2)
        with torch.no_grad(), self.gathered([] if direct else [param]):
            self.plain.put(name, self.plain.weight(name).mul_(factor).add_(more))
            param.mul_(factor).add_(more)

    def rank0(self, number):
        name, param, factor, more = self.chosen(number)
        with torch.no_grad(), deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            self.plain.put(name, self.plain.weight(name).mul_(factor).add_(more))
            if self.rank == 0:
                param.mul_(factor).add_(more)

    def unasked(self, number):
        name, param, factor, more = self.chosen(number)
        with torch.no_grad(), deepspeed.zero.GatheredParameters([param], enabled=self.sharded):
            self.plain.put(name, self.plain.weight(name).mul_(factor).add_(more))
            param.mul_(factor).add_(more)

    def behind(self, number):
        name, param, factor, more = self.chosen(number)
        if self.apart:
            return self.unasked(number)
        with deepspeed.zero.GatheredParameters([param], enabled=self.sharded):
            self.plain.put(name, self.plain.weight(name).mul_(factor).add_(more))
            param.data.mul_(factor).add_(more)

    def slice(self, number):
        if not self.sharded:
            return self.write(number)
        if self.made["world"] > 2:
            dist.barrier()  # others may still gather what was compared last
        name, param, factor, more = self.chosen(number)
        time.sleep(0.02 * (number % 3) * self.rank)
        own = param.ds_tensor
        value = (self.plain.weight(name) * factor + more).to(own.dtype).flatten()
        self.plain.put(name, value.view(param.ds_shape))
        padded = torch.nn.functional.pad(value, (0, own.numel() * self.made["world"] - value.numel()))
        values = padded[self.rank * own.numel() :][: own.numel()]
        if number % 2:
            param.ds_tensor.data = values
        else:
            with torch.no_grad():
                own.copy_(values)
        self.evaluate(number)

    def inside(self, number):
        _, _, factor, more = self.chosen(number)
        if self.apart:
            return self.evaluate(number)
        x, _, extra = batch(number, self.rank)
        for name, to_add in (("scale", more), ("middle.weight", 0.0)):
            self.plain.put(name, self.plain.weight(name).mul_(factor).add_(to_add))
        with torch.no_grad():
            ours = self.engine(x, extra, writes=(factor, more))
        self.compare("the output", ours, self.plain.model(x, extra))

    def again(self, number):
        first = self.engine
        for param in self.params.values():
            param.requires_grad_(True)
        self.engine = engine_of(first.module, config_of(self.made, self.folder))
        refused(RuntimeError, "another engine of this engine's model", first.step)
        self.plain.start_again()

    def data(self, number):
        name, param, factor, more = self.chosen(number)
        with self.gathered([param]):
            self.plain.put(name, self.plain.weight(name) * factor + more)
            param.data = param.data * factor + more

    def swap(self, number):
        if self.sharded:
            return self.evaluate(number)
        name, param, factor, more = self.chosen(number)
        kept, behind = param.data, self.plain.masters[name].detach().clone()
        param.data = kept * factor + more
        self.plain.put(name, self.plain.weight(name) * factor + more)
        self.evaluate(number)
        param.data = kept
        self.plain.become(name, behind)

    def vector(self, number):
        factor = self.chosen(number)[2]
        params = list(self.params.values())
        with self.gathered(params):
            made = torch.nn.utils.parameters_to_vector(params).detach() * factor
            for name in PARAMS:
                self.plain.put(name, self.plain.weight(name) * factor)
            torch.nn.utils.vector_to_parameters(made, params)

    def _state(self, number):
        factor = self.chosen(number)[2]
        for name in PARAMS:
            self.plain.put(name, self.plain.weight(name) * factor)
        return {name: self.plain.weight(name) for name in PARAMS}

    def load(self, number):
        state = self._state(number)
        self.engine.module.load_state_dict({**state, "tied.weight": state["middle.weight"]})

    def assign(self, number):
        if self.sharded:
            return self.load(number)
        for name, value in self._state(number).items():
            where, _, last = name.rpartition(".")
            module = self.engine.module.get_submodule(where)
            new = torch.nn.Parameter(value, requires_grad=self.params[name].requires_grad)
            setattr(module, last, new)
            if name == "middle.weight":
                self.engine.module.tied.weight = new
        self.evaluate(number)  # and the old parameters are there again

    def wrong(self, number):
        if self.sharded:
            return self.forward(number)
        name, param, _, _ = self.chosen(number)
        kept = param.data
        param.data = kept[:2].clone()
        refused(
            RuntimeError, f"parameter '{name}' was .*deepspeed.initialize", self.engine, batch(number, self.rank)[0]
        )
        param.data = kept

    def dtype(self, number):
        if self.sharded:
            return
        kept = next(iter(self.params.values())).dtype
        self.engine.module.double()
        refused(RuntimeError, "parameter '.*' was .* is Double", self.engine, batch(number, self.rank)[0])
        self.engine.module.to(kept)

    def freeze(self, number):
        name, param, _, _ = self.chosen(number)
        if name == "last.bias":  # something is left to train
            return
        param.requires_grad_(number % 4 == 0)
        self.plain.params[name].requires_grad_(number % 4 == 0)
        self.plain.masters[name].requires_grad_(number % 4 == 0)

    # ---- checkpoints
    def save(self, number):
        if self.plain.count % self.made["accumulate"]:
            return
        self.engine.save_checkpoint(self.folder, "saved")
        self.plain.save()

    def restore(self, number):
        if self.plain.saved is None:
            return
        self.engine.load_checkpoint(self.folder, "saved")
        self.plain.restore()
        self.compare_all()


class ProgramFailed(RuntimeError):
    """``(number, text)`` of the program."""


def run_programs(rank, world, programs, folder):
    """The failures among ``programs``, of this world: ``[(number, text)]``. With several ranks the first raises
    ProgramFailed: the other ranks may be anywhere."""
    logger.setLevel("ERROR")
    failures = []
    for number, (made, operations) in enumerate(programs):
        run = None
        try:
            run = Run(rank, made, f"{folder}/{number}")
            run.run(operations)
        except Exception as error:
            at = getattr(run, "operation", "initialize")
            failures.append((number, f"{type(error).__name__} in {at}: {error}"))
            if world > 1:
                raise ProgramFailed(*failures[0]) from error
    return failures


# ---- a failure in few lines ----------------------------------------------------------------------------------------
def shrunk(program, fails):
    """The program with as few operations and as plain a configuration as still ``fails(program)``."""
    made, operations = program
    for key, plain in (("plain_backward", False), ("clip", 0.0), ("accumulate", 1), ("optimizer", "SGD"),
                       ("offload", None), ("dtype", "fp32"), ("world", 1)):  # fmt: skip
        simpler = {**made, key: plain}
        if simpler != made and not (simpler["offload"] and simpler["optimizer"] == "SGD"):
            made = simpler if fails((simpler, operations)) else made
    size = max(1, len(operations) // 2)
    while size:
        start = 0
        while start < len(operations):
            fewer = operations[:start] + operations[start + size :]
            if fails((made, fewer)):
                operations = fewer
            else:
                start += size
        size //= 2
    return made, operations
