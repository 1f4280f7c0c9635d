"""Frozen parameters whose values are small floats."""

import copy

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.linear.config import QuantizationConfig
from deepspeed.ops.fp_quantizer import FP_Quantize
from deepspeed.ops.fp_quantizer.weight_form import WeightForm, form_of


class QuantizedParameter(torch.nn.Parameter):
    """A frozen parameter of codes: uint8 ``[groups, group_size * q_bits / 8 + 4]``, each row with an fp32 scale.

    Args:
        data: values of fp32, bf16 or fp16 in any shape, which are quantized at once, on any device; or codes that have
            been made with this ``quantizer``.
        requires_grad: False; True raises ValueError, because codes have no gradient.
        quantization_config: a ``QuantizationConfig``. quantizer: an ``FP_Quantize``, which knows shape and dtype.
    """

    def __new__(cls, data=None, requires_grad=False, quantization_config=None, quantizer=None):
        if requires_grad:
            raise ValueError(
                "QuantizedParameter: requires_grad=True is not supported, because codes have no gradient: train LoRA's "
                "matrices beside it (deepspeed.linear.LoRAConfig), or keep the weight as it is"
            )
        data = torch.empty(0) if data is None else data
        config = QuantizationConfig() if quantization_config is None else quantization_config
        quantizer = FP_Quantize(config) if quantizer is None else quantizer
        if data.dtype != config.q_dtype:
            form = WeightForm(data.shape, data.dtype, config.q_bits, config.group_size)
            quantizer.orig_shape, quantizer.orig_dtype, quantizer.num_groups = form.shape, form.dtype, form.groups
            data = form.encode(data)
        made = torch.Tensor._make_subclass(cls, data.detach(), False)
        made.quantization_config, made.quantizer = config, quantizer
        return made

    def dequantized(self):
        """The values, in the shape and dtype that the parameter was made of: a new tensor.

        ValueError for codes of unknown shape, and for a parameter of which this rank has some rows: the layer's
        ``full_weight()`` gathers those.
        """
        form = form_of(self)
        if form is None:
            raise ValueError("dequantized: these codes were given without the quantizer that made them")
        if self.shape[0] != form.groups:
            raise ValueError(
                f"dequantized: this rank has {self.shape[0]} of {form.groups} groups of a weight that ranks share "
                "(base_weight_sharding); call full_weight() of its layer, on all of them"
            )
        return form.decode(self.data)

    def offload(self, revert=False):
        """Moves the codes to host memory, page-locked where the device copies from it; with ``revert`` back to the
        device."""
        accelerator = get_accelerator()
        if revert:
            self.data = self.data.to(accelerator.current_device_name())
        else:
            self.data = accelerator.pin_memory(self.data.to("cpu"))

    def to(self, *args, **kwargs):
        """A parameter with the same codes on another device. A dtype becomes that of ``dequantized()``; the codes keep
        theirs."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        quantizer = self.quantizer
        if dtype is not None and dtype not in (quantizer.orig_dtype, self.quantization_config.q_dtype):
            quantizer = copy.copy(quantizer)
            quantizer.orig_dtype = dtype
        data = self.data if device is None else self.data.to(device, non_blocking=non_blocking)
        if data.device == self.device and quantizer is self.quantizer:
            return self
        return QuantizedParameter(data, quantization_config=self.quantization_config, quantizer=quantizer)

    def cuda(self, device=None, non_blocking=False):
        """``to(device)``, by default the accelerator's current one."""
        target = get_accelerator().current_device_name() if device is None else device
        return self.to(target, non_blocking=non_blocking)

    def __deepcopy__(self, memo):
        data = self.data.clone(memory_format=torch.preserve_format)
        made = memo[id(self)] = QuantizedParameter(
            data, quantization_config=self.quantization_config, quantizer=self.quantizer
        )
        return made

    def __reduce_ex__(self, protocol):
        return QuantizedParameter, (self.data, False, self.quantization_config, self.quantizer)
