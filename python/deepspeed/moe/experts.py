"""The experts of a layer that this rank has."""

import copy

import torch

from deepspeed._compat import autocast_is_on
from deepspeed.moe.errors import fail
from deepspeed.moe.grouped import run_grouped, steps_of
from deepspeed.utils.z3_leaf_module import set_z3_leaf_module


class Experts(torch.nn.Module):
    """``num_local_experts`` copies of ``expert``, any module that takes rows and gives as many of the same width."""

    def __init__(self, expert, num_local_experts=1, expert_group_name=None):
        super().__init__()
        self.deepspeed_experts = torch.nn.ModuleList([copy.deepcopy(expert) for _ in range(num_local_experts)])
        self.num_local_experts = num_local_experts
        self.layer_name = ""
        self.see_steps()
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # not averaged over all data-parallel ranks
            param.group_name = expert_group_name
        # Stage 3 gathers them together: which of them have rows differs between ranks.
        set_z3_leaf_module(self, True)

    def see_steps(self):
        """Finds out whether all experts can be computed together; after their layers have been replaced, too."""
        self._steps = steps_of(self.deepspeed_experts[0])

    def __getstate__(self):  # functions of torch cannot all be pickled
        return {name: value for name, value in self.__dict__.items() if name != "_steps"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.see_steps()

    def forward(self, inputs, rows=None, first=0, count=None):
        """Part e of ``inputs`` through expert ``first`` + e: equal parts along dimension 1, ``count`` of them (None: of
        all experts), or the next ``rows[e]`` of its rows."""
        if rows is None:
            chunks = inputs.chunk(count or self.num_local_experts, dim=1)
            made = [self._run(first + e, chunk) for e, chunk in enumerate(chunks)]
            # As cat along dimension 1. This way an expert's gradient lies in memory without gaps however many there
            # are, so that torch adds up those of biases in one order.
            rows = torch.cat([one.flatten(0, -2) for one in made])
            return rows.view(len(made), *made[0].shape).transpose(0, 1).flatten(1, 2)
        if self._steps is not None and not autocast_is_on(inputs.device.type) and not self._hooked():
            outputs = run_grouped(self.deepspeed_experts[first : first + len(rows)], self._steps, inputs, rows)
            self._check(first, inputs, outputs)
            return outputs
        return torch.cat([self._run(first + e, chunk) for e, chunk in enumerate(inputs.split(rows))])

    def _run(self, number, chunk):
        output = self.deepspeed_experts[number](chunk)
        output = output[0] if isinstance(output, tuple) else output  # Megatron's layers return a bias, too
        self._check(number, chunk, output)
        return output

    def _check(self, number, given, output):
        if output.shape != given.shape:
            fail(
                self.layer_name,
                f"expert {number} of this rank makes {list(output.shape)} of {list(given.shape)}: what it makes is "
                "as wide as what it gets. Add a layer behind the MoE layer where another width follows",
            )

    def _hooked(self):
        """Whether an expert has hooks, so that experts must run one by one."""
        return any(
            module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
            for module in self.deepspeed_experts.modules()
        )
