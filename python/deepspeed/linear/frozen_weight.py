"""The frozen weight of a linear layer: whole, or the rows that this rank has of it; as it is, or as codes; on the device,
or on the host."""

import dataclasses

import torch

from deepspeed import comm as dist
from deepspeed._compat import autocast_dtype
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import mesh
from deepspeed.linear.quantization import QuantizedParameter
from deepspeed.ops.fp_quantizer.weight_form import form_of
from deepspeed.ops.half_products import add_in_fp32
from deepspeed.zero.gathers.gathered import GatheredParameters
from deepspeed.zero.parameters.param_ranks import ParamRanks, join_rows, row_bounds
from deepspeed.zero.parameters.sharded_parameter import is_sharded


@dataclasses.dataclass(frozen=True)
class Sharing:
    """``size`` neighbouring ranks that share a weight of ``rows`` rows, of which rank ``index`` is this one."""

    size: int
    rows: int

    @classmethod
    def of(cls, size, rows):
        """The sharing among ``size`` ranks; None for one. Raises ValueError where the ranks or rows do not allow it."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if size == 1:
            return None
        if not dist.is_initialized():
            raise ValueError(
                f"base_weight_sharding is {size}, and this process knows no other ranks: call "
                "deepspeed.init_distributed() before layers are made"
            )
        if world % size:
            raise ValueError(f"base_weight_sharding is {size}, which does not divide the {world} ranks of the job")
        if rows < size:
            raise ValueError(
                f"base_weight_sharding is {size}, and the weight has {rows} rows of codes or elements: use fewer ranks"
                ", or a smaller group_size"
            )
        return cls(size, rows)

    @property
    def index(self):
        return dist.get_rank() % self.size

    @property
    def bounds(self):
        """``(first row of this rank, the row behind its last)``."""
        bounds = row_bounds(self.rows, self.size)
        return bounds[self.index], bounds[self.index + 1]

    def ranks(self):
        """The ``ParamRanks`` of the weight."""
        rank, world = dist.get_rank(), dist.get_world_size()
        sharers = [rank - self.index + other for other in range(self.size)]
        same = list(range(self.index, world, self.size))
        lists = {"edp": same, "ep": sharers}
        rows = (self.bounds[0], self.rows)
        return ParamRanks(f"experts.base_weight_{self.size}", lists, mesh.group_over(same), rows=rows)


class _FrozenProduct(torch.autograd.Function):
    """``input`` times the weight of a ``FrozenWeight``. Backward makes the whole weight again, so that none is kept."""

    @staticmethod
    def forward(ctx, input_tensor, layer):
        ctx.layer = layer
        return layer.linear_without_F_linear(input_tensor, layer.full_weight(input_tensor.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return add_in_fp32(torch.matmul, grad, ctx.layer.full_weight(grad.dtype)), None


class FrozenWeight:
    """A mixin for modules with ``weight`` ``[output_dim, input_dim]`` and ``bias``, or None.

    ``take`` makes it an ordinary linear layer. ``freeze`` gives the weight the form in which it rests, once.
    """

    form = sharing = None  # the WeightForm of codes; the Sharing of rows
    on_host = frozen = False

    def take(self, linear):
        """Takes the parameters of ``linear``, a ``torch.nn.Linear``."""
        self.input_dim, self.output_dim = self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    @torch.no_grad()
    def freeze(self, quantization=None, sharing=1, on_host=False):
        """The weight is not trained from now on. ``quantization``: a ``QuantizationConfig``, or None. ``sharing``:
        neighbouring ranks that share its rows. ``on_host``: it rests in host memory."""
        if self.frozen:
            return
        if self.weight.is_meta and not torch.empty(0).is_meta:
            raise ValueError(
                f"the weight [{self.output_dim}, {self.input_dim}] is on the meta device and has no values: load the "
                "model before init_lora, or make it with delay_lora_init=True and load it"
            )
        with GatheredParameters([self.weight] if is_sharded(self.weight) else []):
            whole = self.weight.detach().clone() if is_sharded(self.weight) else self.weight.detach()
        quantizer = None
        if quantization is not None:
            coded = QuantizedParameter(whole, quantization_config=quantization)
            self.form, quantizer, whole = form_of(coded), coded.quantizer, coded.data
        self.sharing = Sharing.of(sharing, whole.shape[0])
        own = whole
        if self.sharing is not None:
            begin, end = self.sharing.bounds
            own = whole[begin:end].clone()
        if on_host:
            own = get_accelerator().pin_memory(own.to("cpu"))
        self.on_host, self.frozen = on_host, True
        if quantization is None:
            self.weight = torch.nn.Parameter(own, requires_grad=False)
        else:
            self.weight = QuantizedParameter(own, quantization_config=quantization, quantizer=quantizer)
        self._mark()

    @torch.no_grad()
    def melt(self):
        """Makes an ordinary layer of it again, whose whole weight is here and is not trained. All ranks that share the
        weight call it."""
        if self.frozen:
            self.weight = torch.nn.Parameter(self.full_weight().clone(), requires_grad=False)
        self.weight.requires_grad_(False)
        self.form = self.sharing = None
        self.frozen = self.on_host = False

    def _mark(self):
        if self.frozen:
            self.weight.ds_optim_param = True  # optimizers leave it alone
        if self.sharing is not None:
            self.weight.ds_ranks = self.sharing.ranks()

    @torch.no_grad()
    def full_weight(self, dtype=None):
        """The whole weight ``[output_dim, input_dim]``, in ``dtype`` or its own, on the accelerator. All ranks that
        share it call it."""
        own = self.weight.detach()
        if self.on_host:
            own = own.to(get_accelerator().current_device_name(), non_blocking=True)
        if self.sharing is not None:
            own = join_rows(own, self.weight.ds_ranks)
        if self.form is not None:
            return self.form.decode(own, dtype)
        return own if dtype is None else own.to(dtype)

    @property
    def rests_as_it_is(self):
        return self.form is None and self.sharing is None and not self.on_host

    def linear_without_F_linear(self, input_tensor, weight):
        """``input_tensor`` times the transposed ``weight``, without the bias."""
        return add_in_fp32(lambda rows, columns: torch.matmul(rows, columns.t()), input_tensor, weight)

    def product(self, input_tensor):
        """The output of the frozen layer. Under autocast it is computed in autocast's dtype."""
        if self.rests_as_it_is:
            return torch.nn.functional.linear(input_tensor, self.weight, self.bias)
        narrow = autocast_dtype(input_tensor.device.type)
        out = _FrozenProduct.apply(input_tensor if narrow is None else input_tensor.to(narrow), self)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def extra_repr(self):
        found = f"{self.input_dim}, {self.output_dim}, bias={self.bias is not None}"
        found += "" if self.form is None else f", q_bits={self.form.q_bits}"
        found += "" if self.sharing is None else f", {self.sharing.size} ranks share the weight"
        return f"{found}, on the host" if self.on_host else found

    # ---- moving, copying, loading ----------------------------------------------------------------------------------
    def _apply(self, fn, *args, **kwargs):
        if not self.on_host:
            return super()._apply(fn, *args, **kwargs)
        weight, self._parameters["weight"] = self._parameters["weight"], None
        try:
            super()._apply(fn, *args, **kwargs)
        finally:
            self._parameters["weight"] = weight
        dtype = fn(torch.empty(0, dtype=weight.dtype)).dtype
        if dtype != weight.dtype:
            weight.data = get_accelerator().pin_memory(weight.data.to(dtype))
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        """Takes this rank's rows of a whole weight, in elements or in codes, or the rows alone."""
        key = f"{prefix}weight"
        given = state_dict.get(key)
        if self.frozen and torch.is_tensor(given) and not is_sharded(self.weight):
            state_dict = {**state_dict, key: self._own(given)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _own(self, given):
        if self.form is not None and given.shape == self.form.shape and given.dtype.is_floating_point:
            given = self.form.encode(given)
        if self.sharing is not None and given.shape[:1] == (self.sharing.rows,):
            begin, end = self.sharing.bounds
            given = given[begin:end]
        return given
