"""Adam8bit: Adam and AdamW whose two states take one byte per element each.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization": dynamic tree quantisation, one fp32 maximum for
each block of 256 elements. The numbers are in ``csrc/kernels/code_book.h``.
"""

import torch

from deepspeed.ops.fused_optimizer import FusedOptimizer
from deepspeed.ops.native_optimizer import adam_defaults

_MAXIMA = {"exp_avg": "exp_avg_max", "exp_avg_sq": "exp_avg_sq_max"}
BLOCK = 256


class Adam8bit(FusedOptimizer):
    """Adam (``adam_w_mode=False``) or AdamW with 8-bit states: a quarter of the memory of fp32 ones.

    ``state[p]`` holds ``step``, the codes ``exp_avg`` and ``exp_avg_sq`` (uint8, shaped like the parameter) and the
    maxima ``exp_avg_max`` and ``exp_avg_sq_max`` (fp32, one for each 256 elements in row order). Parameters of fewer
    than ``min_8bit_size`` elements, and those that are not contiguous, have fp32 states and no maxima.

    The states cannot be cut into shards: with ZeRO use FusedAdam.

    Args:
        params: iterable of parameters (fp32, bf16 or fp16) or of parameter groups.
        lr, bias_correction, betas, eps, adam_w_mode, weight_decay, set_grad_none: as in ``FusedAdam``.
        min_8bit_size: the smallest number of elements that is worth it; small tensors (norms, biases) matter most for
            stability and least for memory.

    Raises:
        ValueError: a hyperparameter is out of range.
        RuntimeError: a sparse gradient, or CUDA parameters where no CUDA kernels were built.
    """

    rule = "adam"
    states_in_one_piece = True  # an engine that shards refuses it

    def __init__(self, params, lr=0.001, bias_correction=True, betas=(0.9, 0.999), eps=1e-08, adam_w_mode=True,
                 weight_decay=0.0, set_grad_none=True, min_8bit_size=4096):  # fmt: skip
        if min_8bit_size < 1:
            raise ValueError(f"Adam8bit: min_8bit_size must be at least 1, got {min_8bit_size}.")
        self.min_8bit_size = min_8bit_size
        defaults = adam_defaults(lr, bias_correction, betas, eps, weight_decay)
        super().__init__(params, defaults, set_grad_none, decoupled=bool(adam_w_mode))
        self.adam_w_mode = 1 if adam_w_mode else 0

    def _init_state(self, param, slots):
        if param.numel() < self.min_8bit_size or not param.is_contiguous():
            return super()._init_state(param, slots)
        state = self.state[param]
        state["step"] = int(state.get("step", 0))
        for slot in slots:
            state[slot] = torch.zeros_like(param, dtype=torch.uint8)
            state[_MAXIMA[slot]] = torch.zeros(-(-param.numel() // BLOCK), dtype=torch.float32, device=param.device)
        return state

    def _update(self, rule, args, device, step, params, grads, states):
        narrow = [i for i, codes in enumerate(states[0]) if codes.dtype == torch.uint8]
        wide = [i for i, codes in enumerate(states[0]) if codes.dtype != torch.uint8]
        for kind, chosen in (("adam8bit", narrow), (rule, wide)):
            if not chosen:
                continue
            slots = [[slot[i] for i in chosen] for slot in states]
            if kind == "adam8bit":
                slots += [[self.state[params[i]][name] for i in chosen] for name in _MAXIMA.values()]
            super()._update(kind, args, device, step, [params[i] for i in chosen], [grads[i] for i in chosen], slots)

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """Restore hyperparameters and state; codes stay codes."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if torch.is_tensor(value):
                    self.state[param][name] = value.detach().clone().to(param.device)
