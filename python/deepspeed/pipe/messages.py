"""What a stage sends and receives, and what it keeps for that in its buffers: a base of ``PipelineEngine``."""

import torch

from deepspeed.pipe.profile import tensors_of

ACTIVATIONS, GRADS = False, True  # the two streams of messages between two stages


class Messages:
    """Needs ``channel`` and the stage's neighbours."""

    def _neighbour(self, kind):
        return self.prev_stage if kind in ("RecvActivation", "SendGrad") else self.next_stage

    def _exec_recv_activations(self, buffer_id, chunk=0, micro=None, peer=None):
        held = self._micro_batch(buffer_id, chunk, micro)
        tensors, packed = self._recv(ACTIVATIONS, self.prev_stage if peer is None else peer)
        held.inputs = tuple(tensors) if packed else tensors[0]

    def _send(self, stream, to, tensors, packed):
        if self._slices is not None:
            tensors = self._slices.cut(stream, to, tensors)
        self.channel.send(stream, to, tensors, packed)

    def _recv(self, stream, source):
        tensors, packed = self.channel.recv(stream, source)
        return tensors if self._slices is None else self._slices.join(stream, tensors), packed

    def _exec_send_activations(self, buffer_id, chunk=0, micro=None, peer=None):
        held = self._records[buffer_id]
        to = self.next_stage if peer is None else peer
        self._send(ACTIVATIONS, to, tensors_of(held.outputs), isinstance(held.outputs, tuple))
        if not torch.is_grad_enabled():
            held.outputs = None

    def _exec_send_grads(self, buffer_id, chunk=0, micro=None, peer=None):
        to = self.prev_stage if peer is None else peer
        self._send(GRADS, to, self._input_grads(self._records[buffer_id]), True)

    def _exec_recv_grads(self, buffer_id, chunk=0, micro=None, peer=None):
        held = self._records[buffer_id]
        held.grads, _ = self._recv(GRADS, self.next_stage if peer is None else peer)
        self.__dict__["grad_layer"] = tuple(held.grads)

    def _input_grads(self, held):
        inputs = tensors_of(held.inputs)
        held.free_inputs()
        return [one.grad for one in inputs if one.requires_grad]
