"""What each instruction of a schedule does on this stage: the base of ``PipelineEngine`` that runs schedules.

Several parts of the model may be on one stage (``virtual_stages``): then instructions say which (``chunk``), of which
micro-batch (``micro``), and with whom they exchange (``peer``). Without that they are about the only part, in order.
"""

import functools

import torch

from deepspeed import _native
from deepspeed.pipe import instructions as ops
from deepspeed.pipe.failures import Failures
from deepspeed.pipe.messages import Messages
from deepspeed.pipe.micro_batch import BUFFERS, Column, MicroBatch
from deepspeed.pipe.place import MICRO_BATCH
from deepspeed.pipe.plans import shapes_of
from deepspeed.pipe.profile import tensors_of
from deepspeed.pipe.schedule import kind_of
from deepspeed.zero.nested import cast_floats, move_to_device

_PASSES = {ops.ForwardPass, ops.BackwardPass, ops.BackwardInputPass, ops.BackwardWeightPass}


class Execution(Messages, Failures):
    """Runs schedules. Needs ``module``, ``channel``, ``device`` and the methods of an engine."""

    _INSTRUCTION_MAP = {}  # instruction class -> function(engine, **arguments of the instruction)

    def _start_execution(self):
        self._records = []  # of each buffer its MicroBatch
        self._ahead = {}  # (part, micro-batch) -> MicroBatch that another part has begun, and that has no buffer yet
        self.pipe_buffers = {name: Column(self._records, name) for name in BUFFERS}
        self.num_pipe_buffers = 0
        self.total_loss = None  # sum over micro-batches, on the last stage
        self.fwd_outputs = []  # of each micro-batch: its loss, or what the model returned
        self.logits = []  # what the model returned, in an evaluation
        self.loss = None  # of the last forward pass
        self.grad_layer = None  # gradients of outputs, received last
        self._compute_loss = True
        self._force_grad_boundary = False
        self._seen = 0  # micro-batches that have come to this stage
        self._steps.ends_later = True

    # ---- a schedule --------------------------------------------------------------------------------------------------
    def _exec_schedule(self, pipe_schedule):
        """Runs the steps of ``pipe_schedule``, which are lists of instructions, one after the other. The hooks at the
        end of an optimizer step run after the schedule: in ``train_batch``, or here before the next schedule where a
        client has a ``train_batch`` of its own."""
        self._steps.end()
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        steps = [list(step) for step in pipe_schedule]
        self.fwd_outputs, self.logits, self._seen = [], [], 0
        self._begin_schedule([one for step in steps for one in step])
        command, functions, last, words = None, self._INSTRUCTION_MAP, self._last_backward, self.module.place.words
        own, measures = self.__dict__, self._busy is not None  # assignments to attributes of a Module are slow
        try:
            for step in steps:
                for command in step:
                    own["_force_grad_boundary"] = command is last
                    self._stand_at(command, words)
                    function = functions.get(type(command))
                    if function is None:
                        raise RuntimeError(
                            f"{type(self).__name__} does not know the instruction {command!r}: add its class to "
                            f"_INSTRUCTION_MAP"
                        )
                    begin = self._now()
                    function(self, **command.kwargs)
                    if measures and type(command) in _PASSES:
                        own["_last_pass"] = end = self._now()
                        own["_busy"] += end - begin
            self.channel.settle()
        except BaseException as error:
            self._give_up(command, error)
        finally:
            self._force_grad_boundary = self._accumulation.in_no_sync = False
            self._records[:] = [MicroBatch() for _ in self._records]
            self._ahead.clear()

    def _reserve_pipe_buffers(self, num_buffers):
        """Makes ``num_buffers`` buffers, if there are fewer."""
        self._records.extend(MicroBatch() for _ in range(num_buffers - len(self._records)))
        self.num_pipe_buffers = max(num_buffers, self.num_pipe_buffers)

    def _begin_schedule(self, commands):
        """Says what will be received; gradients are reduced while the last backward runs, where nothing follows it."""
        counts, last, splits = {}, None, False
        for command in commands:
            kind = kind_of(command)
            if kind in ("RecvActivation", "RecvGrad"):
                key = (kind == "RecvGrad", command.kwargs.get("peer", self._neighbour(kind)))
                counts[key] = counts.get(key, 0) + 1
            elif kind in ("BackwardPass", "BackwardWeightPass"):
                last = command
            elif kind == "BackwardInputPass":
                splits = True
        if splits and not self._split_prepared:
            self._prepare_split()
        for (grads, peer), count in counts.items():
            self.channel.expect(grads, peer, count)
        # What is tied is added up over stages before it is reduced; sharded gradients afterwards, so none stay whole.
        waits = bool(self.module.tied_comms) and not self._stage_policy.shards_grads
        self._last_backward = None if waits else last
        self._accumulation.in_no_sync = waits and last is not None

    def _part(self, chunk):
        return self.module.pipe_shape.virtual_stage(self.stage_id, chunk)

    def _micro_batch(self, buffer_id, chunk, micro):
        """The micro-batch in a buffer: as the instruction says, else they come in order."""
        held, part = self._records[buffer_id], self._part(chunk)
        if micro is None:
            micro = held.number
            if micro is None:
                micro, self._seen = self._seen, self._seen + 1
            self.module.place.words[MICRO_BATCH] = micro + 1  # else the instruction has said it
        if held.number != micro or held.part != part:
            held = self._records[buffer_id] = self._ahead.pop((part, micro), held)
            held.part, held.number = part, micro
        return held

    def _record_of(self, part, number):
        """The record of a micro-batch on ``part``; None where that part is on another stage."""
        if self.module.pipe_shape.rank_of(part) != self.stage_id:
            return None
        for held in self._records:
            if held.number == number and held.part == part:
                return held
        return self._ahead.setdefault((part, number), MicroBatch(part, number))

    # ---- inputs ------------------------------------------------------------------------------------------------------
    def _exec_load_micro_batch(self, buffer_id, chunk=0, micro=None):
        held = self._micro_batch(buffer_id, chunk, micro)
        inputs, labels = self._pair(self._next_batch(held.number))
        if held.part == 0:
            if self.fp16_enabled() and self.fp16_auto_cast():
                inputs = cast_floats(inputs, torch.float16)
            held.inputs = self._inputs_of(inputs)
            if self._sample is None:
                self._sample = shapes_of(held.inputs)
        last = self._record_of(self._last_part, held.number)
        if last is not None:
            last.labels = move_to_device(labels, self.device)
            if self._label_sample is None:
                self._label_sample = _shapes_of_labels(labels)

    def _inputs_of(self, inputs):
        inputs = move_to_device(inputs, self.device)
        if isinstance(inputs, list):
            inputs = tuple(inputs)
        if not isinstance(inputs, torch.Tensor) and not tensors_of(inputs):
            raise TypeError(
                f"the inputs of a micro-batch are {type(inputs).__name__}: a tensor or a tuple of tensors goes to the "
                f"first layer"
            )
        return inputs

    # ---- passes ------------------------------------------------------------------------------------------------------
    def _exec_forward_pass(self, buffer_id, chunk=0, micro=None):
        held = self._micro_batch(buffer_id, chunk, micro)
        with self._experts.counting():
            held.outputs = self.module(held.inputs, chunk)
        if held.part == self._last_part:
            self._keep_loss(held)
        else:
            held.output_tensors = held.outputs
            after = self._record_of(held.part + 1, held.number)
            if after is not None:
                after.inputs = _detached(held.outputs)
        if not torch.is_grad_enabled():
            held.free_inputs()

    def _keep_loss(self, held):
        loss = held.outputs
        if self._compute_loss and self.module.loss_fn is not None:
            loss = self.module.loss_fn(held.outputs, held.labels)
        if torch.is_grad_enabled():
            self._check_loss(loss)
        own = self.__dict__
        own["loss"] = held.loss = loss
        if not torch.is_grad_enabled():
            self.logits.append(held.outputs)
        self.fwd_outputs.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self._compute_loss and isinstance(loss, torch.Tensor):
            before = self.total_loss
            own["total_loss"] = loss.detach().clone() if before is None else before + loss.detach()

    def _check_loss(self, loss):
        what = "loss_fn" if self.module.loss_fn is not None else "the last layer (there is no loss_fn=)"
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"{what} returned {type(loss).__name__}: train_batch() needs a scalar tensor, the loss")
        if loss.numel() != 1:
            raise ValueError(
                f"{what} returned a tensor of shape {tuple(loss.shape)}: train_batch() needs a scalar; reduce it, for "
                f"example with .mean()"
            )

    def _exec_backward_pass(self, buffer_id, chunk=0, micro=None):
        held = self._micro_batch(buffer_id, chunk, micro)
        outputs, grads = self._heads(held)
        self._run_backward(functools.partial(torch.autograd.backward, outputs, grads) if outputs else None)
        self._after_input_grads(held)

    def _exec_backward_input_pass(self, buffer_id, chunk=0, micro=None):
        held = self._micro_batch(buffer_id, chunk, micro)
        outputs, grads = self._heads(held)
        if outputs and self._stage_policy.shards_params:  # weights are here for one use, not for two
            self._run_backward(functools.partial(torch.autograd.backward, outputs, grads))
        elif outputs:
            inputs = [one for one in tensors_of(held.inputs) if one.requires_grad]
            held.split = _native._C.SplitBackward(outputs, grads, inputs)
            self._run_backward(held.split.run_inputs if inputs else None)
        self._after_input_grads(held)

    def _exec_backward_weight_pass(self, buffer_id, chunk=0, micro=None):
        split = self._records[buffer_id].take("split")
        self._run_backward(None if split is None else split.run_weights)

    def _heads(self, held):
        """Outputs that gradients have come for, and these."""
        if held.part == self._last_part:
            root = held.take("loss") / self.gradient_accumulation_steps()
            root = root.float() * self.stepping.loss_scale if self.stepping.loss_scale != 1.0 else root
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
        reduces = self._accumulation.reduces_now()
        if run is None and not reduces:
            return
        self.core.begin_backward(reduces)
        try:
            if run is not None:
                run()
        except BaseException:
            self.core.abort_backward()
            raise
        self.core.end_backward()
        self._backward.seen = True

    def _after_input_grads(self, held):
        held.outputs = held.output_tensors = held.labels = None
        before = None if held.part == 0 else self._record_of(held.part - 1, held.number)
        if before is not None:
            before.grads = self._input_grads(held)
        elif held.part == 0:
            held.free_inputs()

    # ---- the end of a batch ------------------------------------------------------------------------------------------
    def _exec_reduce_tied_grads(self):
        """Gradients of tied weights become their sums over the stages that have copies: those of this rank, which are
        not reduced yet; at ZeRO stages 2 and 3 reduced ones, of which this rank has a part."""
        sharded = self._stage_policy.shards_grads
        if sharded and self._tied:
            self.core.finish_backward()
        for key, communicator in self._tied.items():
            for weight in self.module.tied_weights(key):
                index = self._trained_index.get(id(weight))
                if index is None:  # frozen
                    continue
                grad = None if sharded else self.core.local_grad(index)
                grad = self.core.full("grad", 0, index) if grad is None else grad
                shape = getattr(weight, "ds_shape", weight.shape)
                grad = torch.zeros(shape, device=self.device) if grad is None else grad.contiguous()
                communicator.run("all_reduce", output=grad, tag=f"tied {key}").wait()
                if sharded:
                    self.core.set_full("grad", 0, index, grad)
                else:
                    self.core.set_local_grad(index, grad)

    def _exec_reduce_grads(self):
        self._force_grad_boundary = True
        self._accumulation.in_no_sync = False
        self.core.finish_backward()

    def _exec_optimizer_step(self, lr_kwargs=None):
        self._force_grad_boundary, self._backward.seen = True, True
        self.channel.settle()
        try:
            self._steps.step(lr_kwargs)
        finally:
            self._force_grad_boundary = False
        self.micro_steps += self.micro_batches - 1


def _shapes_of_labels(labels):
    """For the plan; None where they are more than a tensor or some tensors."""
    plain = isinstance(labels, torch.Tensor)
    labels = labels if plain else tuple(labels) if isinstance(labels, (tuple, list)) else ()
    return shapes_of(labels) if plain or (labels and len(tensors_of(labels)) == len(labels)) else None


def _detached(value):
    """What another part of this stage computes with: its own leaves."""
    if isinstance(value, tuple):
        return tuple(_detached(one) for one in value)
    return value.detach().requires_grad_(value.requires_grad)


Execution._INSTRUCTION_MAP = {
    ops.LoadMicroBatch: Execution._exec_load_micro_batch,
    ops.ForwardPass: Execution._exec_forward_pass,
    ops.BackwardPass: Execution._exec_backward_pass,
    ops.BackwardInputPass: Execution._exec_backward_input_pass,
    ops.BackwardWeightPass: Execution._exec_backward_weight_pass,
    ops.SendActivation: Execution._exec_send_activations,
    ops.RecvActivation: Execution._exec_recv_activations,
    ops.SendGrad: Execution._exec_send_grads,
    ops.RecvGrad: Execution._exec_recv_grads,
    ops.ReduceTiedGrads: Execution._exec_reduce_tied_grads,
    ops.ReduceGrads: Execution._exec_reduce_grads,
    ops.OptimizerStep: Execution._exec_optimizer_step,
}
