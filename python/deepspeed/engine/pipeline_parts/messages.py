"""Messages that a stage sends and receives, and the tensors that its buffers keep for them."""

import torch

from deepspeed.engine.members import Part, member, pipeline_parts
from deepspeed.pipe.profile import tensors_of
from deepspeed.pipe.slices import ACTIVATIONS, GRADS


@pipeline_parts.add("_messages")
class Messages(Part):
    """A part of a pipeline's engine."""

    engine_attributes = ("grad_layer",)

    grad_layer = None  # gradients of outputs, received last

    def neighbour(self, kind):
        return self.engine.prev_stage if kind in ("RecvActivation", "SendGrad") else self.engine.next_stage

    @member
    def _exec_recv_activations(self, buffer_id, chunk=0, micro=None, peer=None):
        held = self.engine._execution.micro_batch(buffer_id, chunk, micro)
        tensors, packed = self._recv(ACTIVATIONS, self.engine.prev_stage if peer is None else peer)
        held.inputs = tuple(tensors) if packed else tensors[0]

    def _send(self, stream, to, tensors, packed):
        links = self.engine._links
        if links.slices is not None:
            tensors = links.slices.cut(stream, to, tensors)
        links.channel.send(stream, to, tensors, packed)

    def _recv(self, stream, source):
        links = self.engine._links
        tensors, packed = links.channel.recv(stream, source)
        return tensors if links.slices is None else links.slices.join(stream, tensors), packed

    @member
    def _exec_send_activations(self, buffer_id, chunk=0, micro=None, peer=None):
        held = self.engine._execution.records[buffer_id]
        to = self.engine.next_stage if peer is None else peer
        self._send(ACTIVATIONS, to, tensors_of(held.outputs), isinstance(held.outputs, tuple))
        if not torch.is_grad_enabled():
            held.outputs = None

    @member
    def _exec_send_grads(self, buffer_id, chunk=0, micro=None, peer=None):
        to = self.engine.prev_stage if peer is None else peer
        self._send(GRADS, to, self.input_grads(self.engine._execution.records[buffer_id]), True)

    @member
    def _exec_recv_grads(self, buffer_id, chunk=0, micro=None, peer=None):
        held = self.engine._execution.records[buffer_id]
        held.grads, _ = self._recv(GRADS, self.engine.next_stage if peer is None else peer)
        self.grad_layer = tuple(held.grads)

    def input_grads(self, held):
        inputs = tensors_of(held.inputs)
        held.free_inputs()
        return [one.grad for one in inputs if one.requires_grad]
