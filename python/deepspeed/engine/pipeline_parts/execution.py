"""Carries out the instructions of a schedule on this stage.

Several parts of the model may be on one stage (``virtual_stages``): then instructions say which (``chunk``), of which
micro-batch (``micro``), and with whom they exchange (``peer``). Without that they are about the only part, in order.
"""

import collections
import contextlib
import functools
import time

import torch

from deepspeed import _native
from deepspeed.engine.members import inside_hooks, member, pipeline_parts
from deepspeed.pipe import instructions as ops
from deepspeed.pipe.micro_batch import BUFFERS, Column, MicroBatch
from deepspeed.pipe.position import MICRO_BATCH
from deepspeed.pipe.profile import tensors_of
from deepspeed.pipe.schedule import kind_of
from deepspeed.zero.nested import cast_floats, move_to_device, replace

_PASSES = {ops.ForwardPass, ops.BackwardPass, ops.BackwardInputPass, ops.BackwardWeightPass}
_PHASES = {
    "LoadMicroBatch": "data",
    "ForwardPass": "forward",
    "ReduceTiedGrads": "backward",
    "ReduceGrads": "backward",
    **dict.fromkeys(("BackwardPass", "BackwardInputPass", "BackwardWeightPass"), "backward"),
    **dict.fromkeys(("SendActivation", "RecvActivation", "SendGrad", "RecvGrad"), "communication"),
}


@pipeline_parts.add("_execution")
class Execution:
    """A part of a pipeline's engine. It runs schedules."""

    engine_attributes = (
        "pipe_buffers", "num_pipe_buffers", "total_loss", "fwd_outputs", "logits", "loss", "_compute_loss",
    )  # fmt: skip

    def __init__(self, engine):
        self.engine = engine
        self.records = []  # of each buffer its MicroBatch
        self._ahead = {}  # (part, micro-batch) -> MicroBatch that another part has begun, and that has no buffer yet
        self.pipe_buffers = {name: Column(self.records, name) for name in BUFFERS}
        self.num_pipe_buffers = 0
        self.total_loss = None  # sum over micro-batches, on the last stage
        self.fwd_outputs = []  # of each micro-batch: its loss, or what the model returned
        self.logits = []  # what the model returned, in an evaluation
        self.loss = None  # of the last forward pass
        self._compute_loss = True
        self._seen = 0  # micro-batches that have come to this stage
        engine._window.scheduled = True

    @functools.cached_property
    def last_part(self):
        """The number of the last part of the model."""
        return len(self.engine.module.parts) - 2

    @functools.cached_property
    def _trained_index(self):
        trained = [param for group in self.engine.trained_groups for param in group]
        return {id(param): index for index, param in enumerate(trained)}

    # ---- a schedule --------------------------------------------------------------------------------------------------
    @member
    def _exec_schedule(self, pipe_schedule):
        """Runs the steps of ``pipe_schedule``, which are lists of instructions, one after the other. The hooks at the
        end of an optimizer step run after the schedule: in ``train_batch``, or here before the next schedule where a
        client has a ``train_batch`` of its own."""
        engine = self.engine
        engine._steps.end()
        buffers = pipe_schedule.num_pipe_buffers()
        self.records.extend(MicroBatch() for _ in range(buffers - len(self.records)))
        self.num_pipe_buffers = max(buffers, self.num_pipe_buffers)
        steps = [list(step) for step in pipe_schedule]
        self.fwd_outputs, self.logits, self._seen = [], [], 0
        last = self._begin_schedule([one for step in steps for one in step])
        command, functions, measured = None, engine._INSTRUCTION_MAP, engine._measured
        failures, words = engine._failures, engine.module.position.words
        try:
            for step in steps:
                for command in step:
                    # Gradients are reduced for the step during the last backward of a batch, and in the step.
                    engine._window.set_boundary(command is last)
                    failures.stand_at(command, words)
                    function = functions.get(type(command))
                    if function is None:
                        raise RuntimeError(
                            f"{type(engine).__name__} does not know the instruction {command!r}: add its class to "
                            f"_INSTRUCTION_MAP"
                        )
                    begin = time.perf_counter()
                    with self._phase_of(command):
                        function(engine, **command.kwargs)
                    if measured.measures and type(command) in _PASSES:
                        measured.add_pass(begin)
            engine._links.channel.settle()
        except BaseException as error:
            failures.give_up(command, error)
        finally:
            engine._window.set_boundary(None)
            engine._window.no_sync = False
            self.records[:] = [MicroBatch() for _ in self.records]
            self._ahead.clear()

    def _begin_schedule(self, commands):
        """Says what will be received. Returns the last backward if gradients are reduced while it runs: where nothing
        follows it."""
        kinds, neighbour = [(kind_of(command), command) for command in commands], self.engine._messages.neighbour
        if any(kind == "BackwardInputPass" for kind, _ in kinds):
            self.engine._plans.prepare_split()
        received = collections.Counter(
            (kind == "RecvGrad", command.kwargs.get("peer", neighbour(kind)))
            for kind, command in kinds
            if kind in ("RecvActivation", "RecvGrad")
        )
        self.engine._links.channel.begin(any("Backward" in (kind or "") for kind, _ in kinds))
        for (grads, peer), count in received.items():
            self.engine._links.channel.expect(grads, peer, count)
        backwards = [command for kind, command in kinds if kind in ("BackwardPass", "BackwardWeightPass")]
        last = backwards[-1] if backwards else None
        # Gradients of tied weights are added up over stages before the reduction; sharded ones after it, so that none
        # stay whole.
        waits = bool(self.engine.module.tied_comms) and not self.engine._stage_policy.shards_grads
        self.engine._window.no_sync = waits and last is not None
        return None if waits else last

    def _phase_of(self, command):
        """A context: the phase of the training that the instruction is. That of the step begins with it by itself."""
        name = _PHASES.get(kind_of(command)) if torch.is_grad_enabled() else None
        if name in ("forward", "backward"):
            return self.engine.progress.inside(name)
        return contextlib.nullcontext() if name is None else self.engine._step_log.phases.inside(name)

    def micro_batch(self, buffer_id, chunk, micro):
        """The micro-batch in a buffer: as the instruction says, else they come in order."""
        held, part = self.records[buffer_id], self.engine.module.pipe_shape.virtual_stage(self.engine.stage_id, chunk)
        if micro is None:
            micro = held.number
            if micro is None:
                micro, self._seen = self._seen, self._seen + 1
            self.engine.module.position.words[MICRO_BATCH] = micro + 1  # else the instruction has said it
        if held.number != micro or held.part != part:
            held = self.records[buffer_id] = self._ahead.pop((part, micro), held)
            held.part, held.number = part, micro
        return held

    def _record_of(self, part, number):
        """The record of a micro-batch on ``part``; None where that part is on another stage."""
        if self.engine.module.pipe_shape.rank_of(part) != self.engine.stage_id:
            return None
        here = (held for held in self.records if held.number == number and held.part == part)
        return next(here, None) or self._ahead.setdefault((part, number), MicroBatch(part, number))

    # ---- inputs ------------------------------------------------------------------------------------------------------
    @member
    def _exec_load_micro_batch(self, buffer_id, chunk=0, micro=None):
        held = self.micro_batch(buffer_id, chunk, micro)
        batches, plans = self.engine._batches, self.engine._plans
        inputs, labels = batches.pair(batches.next_batch(held.number))
        if torch.is_grad_enabled():
            self.engine._postmortem.see_inputs((inputs, labels), {})
            self.engine._tensors.see_inputs((*tensors_of(inputs), labels), {})
        if held.part == 0:
            if self.engine.fp16_enabled() and self.engine.fp16_auto_cast():
                inputs = cast_floats(inputs, torch.float16)
            held.inputs = batches.inputs_of(inputs)
            self.engine._tokens.see_micro_batch(held.inputs, held.number)
            plans.see_inputs(held.inputs)
        last = self._record_of(self.last_part, held.number)
        if last is not None:
            last.labels = move_to_device(labels, self.engine.device)
            plans.see_labels(labels)

    # ---- passes ------------------------------------------------------------------------------------------------------
    @member
    def _exec_forward_pass(self, buffer_id, chunk=0, micro=None):
        held = self.micro_batch(buffer_id, chunk, micro)
        if torch.is_grad_enabled():
            self.engine._operations.see_pass(held.part, held.number, "forward", held.inputs)
        with inside_hooks(self.engine, "forward"):
            held.outputs = self.engine.module(held.inputs, chunk)
        if held.part == self.last_part:
            self._keep_loss(held)
        else:
            held.output_tensors = held.outputs
            after = self._record_of(held.part + 1, held.number)
            if after is not None:
                # Leaves with the same values, with which another part of this stage computes.
                after.inputs = replace(
                    held.outputs, torch.is_tensor, lambda one: one.detach().requires_grad_(one.requires_grad)
                )
        if not torch.is_grad_enabled():
            held.free_inputs()

    def _keep_loss(self, held):
        loss = held.outputs
        if self._compute_loss and self.engine.module.loss_fn is not None:
            loss = self.engine.module.loss_fn(held.outputs, held.labels)
        if torch.is_grad_enabled():
            self._check_loss(loss)
        self.loss = held.loss = loss
        if not torch.is_grad_enabled():
            self.logits.append(held.outputs)
        self.fwd_outputs.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self._compute_loss and isinstance(loss, torch.Tensor):
            loss = loss.detach() * self._weight(held)
            self.total_loss = loss if self.total_loss is None else self.total_loss + loss

    def _weight(self, held):
        return self.engine._dynamic.weight(held.number) if torch.is_grad_enabled() else 1.0

    def _check_loss(self, loss):
        what = "loss_fn" if self.engine.module.loss_fn is not None else "the last layer (there is no loss_fn=)"
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"{what} returned {type(loss).__name__}: train_batch() needs a scalar tensor, the loss")
        if loss.numel() != 1:
            raise ValueError(
                f"{what} returned a tensor of shape {tuple(loss.shape)}: train_batch() needs a scalar; reduce it, for "
                f"example with .mean()"
            )

    @member
    def _exec_backward_pass(self, buffer_id, chunk=0, micro=None):
        held = self.micro_batch(buffer_id, chunk, micro)
        outputs, grads = self._heads(held)
        self.engine._operations.see_pass(held.part, held.number, "whole")
        self._run_backward(functools.partial(torch.autograd.backward, outputs, grads) if outputs else None)
        self._after_input_grads(held)

    @member
    def _exec_backward_input_pass(self, buffer_id, chunk=0, micro=None):
        held = self.micro_batch(buffer_id, chunk, micro)
        outputs, grads = self._heads(held)
        self.engine._operations.see_pass(held.part, held.number, "inputs")
        if outputs and self.engine._stage_policy.shards_params:  # weights are here for one use, not for two
            self._run_backward(functools.partial(torch.autograd.backward, outputs, grads))
        elif outputs:
            inputs = [one for one in tensors_of(held.inputs) if one.requires_grad]
            held.split = _native._C.SplitBackward(outputs, grads, inputs)
            self._run_backward(held.split.run_inputs if inputs else None)
        self._after_input_grads(held)

    @member
    def _exec_backward_weight_pass(self, buffer_id, chunk=0, micro=None):
        held = self.records[buffer_id]
        self.engine._operations.see_pass(held.part, held.number, "weights")
        split = held.take("split")
        self._run_backward(None if split is None else split.run_weights)

    def _heads(self, held):
        """Outputs that gradients have come for, and these."""
        if held.part == self.last_part:
            root, weight = held.take("loss") / self.engine.gradient_accumulation_steps(), self._weight(held)
            root = root if weight == 1.0 else root * weight
            root = root.float() * self.engine.stepping.loss_scale if self.engine.stepping.loss_scale != 1.0 else root
            return ([root], [torch.ones_like(root)]) if root.requires_grad else ([], [])
        grads = held.take("grads")
        outputs = [one for one in tensors_of(held.outputs) if one.requires_grad]
        if len(outputs) != len(grads):
            raise RuntimeError(
                f"{len(grads)} gradients have come for {len(outputs)} outputs of the stage that want one"
            )
        pairs = [(output, grad) for output, grad in zip(outputs, grads) if grad is not None]
        return [output for output, _ in pairs], [grad for _, grad in pairs]

    def _run_backward(self, run):
        """One backward, or a half of one, that the core takes gradients from; None: this rank has nothing to do."""
        reduces = self.engine._window.reduces
        if run is None and not reduces:
            return
        if reduces:
            self.engine._agreement.tell()
        with inside_hooks(self.engine, "backward"):
            self.engine.core.begin_backward()
            try:
                if run is not None:
                    run()
            except BaseException:
                self.engine.core.abort_backward()
                raise
            self.engine.core.end_backward()

    def _after_input_grads(self, held):
        held.outputs = held.output_tensors = held.labels = None
        before = None if held.part == 0 else self._record_of(held.part - 1, held.number)
        if before is not None:
            before.grads = self.engine._messages.input_grads(held)
        elif held.part == 0:
            held.free_inputs()

    # ---- the end of a batch ------------------------------------------------------------------------------------------
    @member
    def _exec_reduce_tied_grads(self):
        """Gradients of tied weights become their sums over the stages that have copies: those of this rank, which are
        not reduced yet; at ZeRO stages 2 and 3 reduced ones, of which this rank has a part."""
        sharded = self.engine._stage_policy.shards_grads
        if sharded and self.engine._links.tied:
            self.engine.core.finish_backward()
        for key, communicator in self.engine._links.tied.items():
            for weight in self.engine.module.tied_weights(key):
                index = self._trained_index.get(id(weight))
                if index is None:  # frozen
                    continue
                grad = None if sharded else self.engine.core.local_grad(index)
                grad = self.engine.core.full("grad", 0, index) if grad is None else grad
                shape = getattr(weight, "ds_shape", weight.shape)
                grad = torch.zeros(shape, device=self.engine.device) if grad is None else grad.contiguous()
                communicator.run("all_reduce", output=grad, tag=f"tied {key}").wait()
                if sharded:
                    self.engine.core.set_full("grad", 0, index, grad)
                else:
                    self.engine.core.set_local_grad(index, grad)

    @member
    def _exec_reduce_grads(self):
        self.engine._window.set_boundary(True)
        self.engine._window.no_sync = False
        self.engine.core.finish_backward()

    @member
    def _exec_optimizer_step(self, lr_kwargs=None):
        self.engine._window.set_boundary(True)
        self.engine._links.channel.settle()
        try:
            self.engine._steps.step(lr_kwargs)
        finally:
            self.engine._window.set_boundary(None)


# The member of an engine that runs each instruction.
INSTRUCTIONS = {
    ops.LoadMicroBatch: "_exec_load_micro_batch",
    ops.ForwardPass: "_exec_forward_pass",
    ops.BackwardPass: "_exec_backward_pass",
    ops.BackwardInputPass: "_exec_backward_input_pass",
    ops.BackwardWeightPass: "_exec_backward_weight_pass",
    ops.SendActivation: "_exec_send_activations",
    ops.RecvActivation: "_exec_recv_activations",
    ops.SendGrad: "_exec_send_grads",
    ops.RecvGrad: "_exec_recv_grads",
    ops.ReduceTiedGrads: "_exec_reduce_tied_grads",
    ops.ReduceGrads: "_exec_reduce_grads",
    ops.OptimizerStep: "_exec_optimizer_step",
}
