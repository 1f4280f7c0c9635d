"""From the losses of the last stage to those that all ranks return."""

import torch

from deepspeed.engine.members import Part, pipeline_parts


@pipeline_parts.add("_losses")
class Losses(Part):
    """A part of a pipeline's engine."""

    def total(self):
        """The mean loss of the batch over micro-batches and copies, on every rank."""
        loss = torch.zeros((), device=self.engine.device)
        if self.engine.is_last_stage():
            loss = self._over_copies(self.engine.total_loss.float().reshape(()) / self.engine.micro_batches)
        return self.from_last_stage(loss) if self.engine.is_pipe_parallel else loss

    def _over_copies(self, value, how="avg"):
        copies = self.engine._links.copies
        if copies is not None:
            value = value.contiguous()
            copies.run("all_reduce", output=value).wait()
            value = value / self.engine.parallel.dp_world_size if how == "avg" else value
        return value

    def from_last_stage(self, value, count=None):
        """A scalar of the last stage, or a list of ``count`` of them, on all stages."""
        flat = torch.zeros(count or 1, device=self.engine.device)
        if self.engine.is_last_stage():
            each = value if count else [value]
            if not all(isinstance(one, torch.Tensor) for one in each):
                raise TypeError(
                    f"eval_batch(): the loss is {type(each[0]).__name__}, and only tensors go to the other stages: "
                    f"pass bcast_loss=False, which leaves it on the last one"
                )
            flat = torch.stack([one.float().mean() for one in each])
        self.engine._links.stages.run("broadcast", output=flat, peer=self.engine._last_stage).wait()
        return list(flat.unbind()) if count else flat.reshape(())

    def outputs(self, how):
        """The outputs of the micro-batches: a list (None), or their sum or mean over micro-batches and copies; of
        tuples for each position."""
        outputs = self.engine.fwd_outputs
        if how is None:
            return outputs
        if isinstance(outputs[0], (tuple, list)):
            return tuple(self._reduced(column, how) for column in zip(*outputs))
        return self._reduced(outputs, how)

    def _reduced(self, outputs, how):
        if not all(isinstance(one, torch.Tensor) for one in outputs):
            raise TypeError(
                f"eval_batch(reduce_output={how!r}): the model returned something else than a tensor, of which there "
                f"is no {'mean' if how == 'avg' else 'sum'}; pass reduce_output=None"
            )
        first = outputs[0].float() if outputs[0].dtype in (torch.float16, torch.bfloat16) else outputs[0].clone()
        total = sum(outputs[1:], first)
        return self._over_copies(total / len(outputs) if how == "avg" else total, how)
