"""Training in half precision for `plain.py`: an optimizer with weights in fp32 and a loss scale."""

import torch
import torch.distributed as dist


class FP16_Optimizer:
    """Wraps the optimizer of a model, which is in fp16. The wrapped optimizer trains copies of the weights in fp32.

    The loss is multiplied by ``loss_scale``. A step whose gradients are not finite is left out, and halves the scale.
    """

    def __init__(self, optimizer, model, loss_scale=2.0**16):
        self.optimizer, self.model, self.loss_scale, self.pairs = optimizer, model, loss_scale, []
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                master = group["params"][index] = param.detach().float().requires_grad_()
                vars(master).update(vars(param))  # whether it is split
                self.pairs.append((param, master))

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.model.zero_grad(set_to_none=True)

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    def update_master_grads(self):
        """Gives the fp32 weights the gradients of the model, without the loss scale."""
        for param, master in self.pairs:
            master.grad = param.grad.float() / self.loss_scale

    def step(self):
        bad = sum((~master.grad.isfinite()).sum() for _, master in self.pairs)
        dist.all_reduce(bad)
        if bad:
            self.loss_scale /= 2
            return
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self.pairs:
                param.copy_(master)

    def state_dict(self):
        masters = [master.detach() for _, master in self.pairs]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters, "scale": self.loss_scale}

    @torch.no_grad()
    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss_scale = state["scale"]
        for (_, master), saved in zip(self.pairs, state["masters"]):
            master.copy_(saved)


def backward(optimizer, loss):
    """The backward pass, of the loss times the loss scale if there is one."""
    optimizer.backward(loss) if isinstance(optimizer, FP16_Optimizer) else loss.backward()


def update_master_grads(optimizer):
    """Hands the gradients to the fp32 weights if these are copies."""
    if isinstance(optimizer, FP16_Optimizer):
        optimizer.update_master_grads()
