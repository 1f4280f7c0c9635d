"""Work and memory of the layers of a pipeline and of its parts, for one micro-batch. The layers run in this process, on
tensors without memory. ``deepspeed.pipe.plan`` and the schedule ``auto`` use the figures."""

import contextlib
import functools

import torch
from torch import nn

from deepspeed._compat import memory_of
from deepspeed._native import _C
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.pipe.layers import LayerSpec, built_on_meta, call_of, count_parameters, describe
from deepspeed.pipe.partitioning import partition
from deepspeed.pipe.planning import NOT_SPLIT, PipelinePlan
from deepspeed.pipe.profile import fresh, saved_bytes, tensors_of
from deepspeed.pipe.recompute import segments
from deepspeed.planner.step import Constants, bytes_of_a_parameter, on_meta
from deepspeed.profiling.op_costs import CountedOps, tensors_in
from deepspeed.utils.init_on_device import copy_on_meta

ELEMENTWISE = 8  # operations that writing one element costs as much as, where no matrices are multiplied


class LayerWork:
    """A layer on the device meta (``call``), and what it takes: operations (of products of matrices and convolutions,
    and some for each element that others write), parameters, and bytes of outputs and of what the backward needs."""

    def __init__(self, layer, dtype):
        module = (
            built_on_meta(layer) if isinstance(layer, LayerSpec) else layer if isinstance(layer, nn.Module) else None
        )
        self.module = module if module is None else copy_on_meta(module).to(dtype=dtype)
        for one in [] if module is None else self.module.modules():
            if isinstance(one, MOELayer):
                _of_this_rank(one)
        self.call = call_of(layer, self.module)
        self.weights = {memory_of(one): one for one in self.module.parameters()} if module is not None else {}
        self.parameters = sum(one.numel() for one in self.weights.values())
        self.forward = self.backward_input = self.backward_weight = self.activation_bytes = self.output_bytes = 0

    def run(self, inputs):
        """The outputs."""
        shapes, counted = Constants(_C.MetaMemory()), CountedOps(self._add)
        with torch.enable_grad(), saved_bytes(self.module) as kept, shapes, counted:
            out = self.call(inputs)
        self.activation_bytes = sum(kept.values())
        self.output_bytes = sum(one.numel() * one.element_size() for one in tensors_of(out))
        return out

    def _add(self, name, cost, operands, out):
        """Adds the cost of an operator. A product with a weight has two gradients, one of each kind; one of two
        activations has two of inputs."""
        if cost.macs:
            used = [self.weights[memory_of(one)] for one in operands if memory_of(one) in self.weights]
            used = [one for one in used if one.dim() > 1] or used  # rather than the bias
            self.forward += 2 * cost.macs
            self.backward_input += 2 * cost.macs if used else 4 * cost.macs
            self.backward_weight += 2 * cost.macs if any(one.requires_grad for one in used) else 0
        elif cost.bytes:
            written = {memory_of(one) for one in operands}
            count = ELEMENTWISE * sum(one.numel() for one in tensors_in([out]) if memory_of(one) not in written)
            self.forward += count
            self.backward_input += count

    def seconds(self, measured):
        """Forward, and the two halves of backward. Without the ``LayerCost`` measured: their operations."""
        if measured is None:
            return self.forward, self.backward_input, self.backward_weight
        share = self.backward_weight / max(self.backward_input + self.backward_weight, 1)
        return measured.forward, measured.backward * (1 - share), measured.backward * share


def _of_this_rank(layer):
    """Makes the ``MOELayer`` one that asks no other rank for anything: those ranks run now, and compute no plan. Their
    experts are this rank's once more, so that as many rows run through experts as this rank gets at equal load."""
    layer.gate.aux_scope = "rank"
    local, ranks = layer.experts.deepspeed_experts, layer.ep_size
    layer.experts.deepspeed_experts = nn.ModuleList([*local] * ranks)
    layer.experts.num_local_experts = layer.num_local_experts = len(local) * ranks
    layer.ep_size, layer.ep_group = 1, None


def layer_works(layers, sample, dtype=None):
    """``LayerWork`` of each layer for the inputs ``sample``, of which only shapes and types are read. ``dtype``: of
    parameters, None: as the layers have it."""
    inputs, works = fresh(sample, "meta"), []
    for number, layer in enumerate(layers):
        try:
            works.append(LayerWork(layer, dtype))
            inputs = fresh(works[-1].run(inputs), "meta")
        except Exception as error:
            raise RuntimeError(
                f"{describe(number, layer)} of the pipeline cannot run on meta tensors: {error}"
            ) from error
    return works


def _forward(calls, interval, names, x, checkpoint):
    for begin, end, again in segments(calls, interval, names):
        packed = isinstance(x, tuple)

        def segment(*inputs, calls=calls[begin:end], packed=packed):
            return functools.reduce(lambda value, call: call(value), calls, inputs if packed else inputs[0])

        inputs = x if packed else (x,)
        x = checkpoint(segment, *inputs) if again else segment(*inputs)
    return x


@contextlib.contextmanager
def _taking_grads(works):
    """A context in which gradients of weights are taken when they come, as the engine does it."""
    weights = [one for work in works for one in work.weights.values() if one.requires_grad]
    nodes = [one.expand_as(one).grad_fn.next_functions[0][0] for one in weights]
    for node, weight in zip(nodes, weights):
        node.register_hook(lambda *_, weight=weight: setattr(weight, "grad", None))
    yield  # nodes live as long as somebody has them


def _passes(*given):
    memory = _C.MetaMemory()  # of what is made from now on: not of weights
    with Constants(memory):
        return _counted_passes(memory, *given)


def _counted_passes(memory, run, inputs, loss, split, notes):
    """The outputs, and bytes: kept, the most in the forward, in the (first) backward, between both, in the second."""
    memory.install()
    try:
        x, held = on_meta(inputs), []
        memory.reset_peak()
        out = run(x, checkpointing.split_checkpoint if split else checkpointing.non_reentrant_checkpoint)
        kept, forward, owner = memory.live, memory.peak, memory.set_owner(memory.ELSEWHERE)
        following = on_meta(out)
        memory.set_owner(owner)
        try:
            if loss is not None:
                held += [out, on_meta(loss[1])]
                out = loss[0](*held)
                kept, forward = memory.live, memory.peak
        except Exception as error:
            notes["the loss does not run on meta tensors, so its memory is not known"] = error
            held.clear()
        first, between, second = kept, 0, 0
        try:
            heads = [one for one in tensors_of(out) if one.requires_grad]
            grads = [torch.empty_like(one) for one in heads]
            memory.reset_peak()
            if heads and not split:
                torch.autograd.backward(heads, grads)
                first = memory.peak
            elif heads:
                halves = _C.SplitBackward(heads, grads, [one for one in tensors_of(x) if one.requires_grad])
                halves.run_inputs()
                first = memory.peak
                del x, out, heads, grads
                held.clear()
                between = memory.live
                memory.reset_peak()
                halves.run_weights()
                second = memory.peak
        except Exception as error:  # a function of the user's whose backward wants values
            notes["cannot run backward on meta tensors, so its peak is not known"] = error
        return following, kept, forward, first, between, second
    finally:
        memory.remove()


def part_memories(works, bounds, sample, interval=0, names=None, split=True, loss=None):
    """For each part of the layers arguments of ``_C.pipe.Part``: bytes that are kept from the forward to the backward
    (inputs, outputs, what the graph holds) and between the halves of a backward, and the most while a forward, a
    backward, its first and its second half run, with what is kept; without weights and their gradients. And what is
    not known, in words, or "".

    interval, names: ``activation_checkpoint_interval`` and ``checkpointable_layers``. split: whether a backward in
    halves is one; False: its first half does everything. loss: of the last part: a function of outputs and labels, and
    labels.
    """
    inputs, found, told = sample, [], ""
    for begin, end in zip(bounds, bounds[1:]):
        calls, notes = [work.call for work in works[begin:end]], {}
        run = functools.partial(_forward, calls, interval, names), inputs, loss if end == bounds[-1] else None
        with torch.enable_grad(), _taking_grads(works[begin:end]):
            following, kept, forward, backward, *_ = _passes(*run, False, notes)
            *_, first, between, second = _passes(*run, True, notes) if split else (backward, 0, 0)
        passes = forward, backward, first, second
        found.append({"activation_bytes": kept, "weight_bytes": between, "pass_bytes": passes})
        for text, error in notes.items():
            told = f"{text}: {error}" if "loss" in text else f"layers {begin} to {end - 1} {text}: {error}"
        inputs = following
    return found, told


# ---- deepspeed.pipe.plan ---------------------------------------------------------------------------------------------
def pipeline_plan(
    layers, num_stages, micro_batches, schedule, sample, partition_method, virtual_stages, placement, costs,
    memory_limit, state_bytes, latency, bytes_per_second, split_backward, activation_checkpoint_interval,
    checkpointable_layers, loss_fn, labels, dtype=None,
):  # fmt: skip
    """``deepspeed.pipe.plan``. ``dtype``: that the engine gives the parameters."""
    works = layer_works(layers, sample, dtype)
    times = [work.seconds(costs[number] if costs else None) for number, work in enumerate(works)]
    parts = num_stages * virtual_stages
    measure, count = lambda: [sum(time) for time in times], lambda: list(map(count_parameters, layers))
    bounds = partition(layers, parts, partition_method, measure, count)
    memories, unknown = part_memories(
        works, bounds, sample, activation_checkpoint_interval, checkpointable_layers, split_backward,
        None if loss_fn is None or labels is None else (loss_fn, labels),
    )  # fmt: skip
    made = []
    for begin, end, memory in zip(bounds, bounds[1:], memories):
        forward, first, second = map(sum, zip(*times[begin:end]))
        made.append(
            _C.pipe.Part(
                forward=forward,
                backward_input=first if split_backward else first + second,
                backward_weight=second if split_backward else 0.0,
                output_bytes=works[end - 1].output_bytes,
                state_bytes=round(state_bytes * sum(work.parameters for work in works[begin:end])),
                **memory,
            )
        )
    network = {"latency": latency, "bytes_per_second": bytes_per_second}
    if schedule == "auto":
        shape = _C.pipe.Shape(num_stages, virtual_stages, micro_batches, placement)
        native, cost = _C.pipe.fastest(shape, made, memory_limit=memory_limit, **network)
    else:
        native = _C.pipe.schedule(schedule, num_stages, virtual_stages, micro_batches, placement)
        native.check()
        cost = native.cost(made, **network)
    splits = any(act.op == "BackwardInputPass" for stage in range(num_stages) for act in native.acts(stage))
    note = "\n".join(filter(None, (NOT_SPLIT if splits and not split_backward else "", unknown)))
    return PipelinePlan(native, cost, [work.parameters for work in works], state_bytes, bounds, costs is not None, note)


def pipe_plan_of(engine, micro_batches=None):
    """``engine.pipe_plan()``."""
    module, plans = engine.module, engine._plans
    why = plans.why_whole()
    found = pipeline_plan(
        module._layer_specs,
        engine.num_stages,
        micro_batches or engine.micro_batches,
        plans.name,
        plans.sample,
        partition_method=module.partitions(),
        virtual_stages=module.pipe_shape.chunks,
        placement=module.pipe_shape.placement,
        costs=module.layer_costs,
        memory_limit=plans.memory_limit,
        state_bytes=bytes_of_a_parameter(engine),
        latency=0.0,
        bytes_per_second=0.0,
        split_backward=not why,
        activation_checkpoint_interval=module.activation_checkpoint_interval,
        checkpointable_layers=module.checkpointable_layers,
        loss_fn=module.loss_fn,
        labels=plans.label_sample,
        dtype=engine.get_data_types()[0],
    )
    found.note = found.note.replace(NOT_SPLIT, f"{NOT_SPLIT}: {why}")
    found.measured = engine._measured.found
    return found
