"""``AutoTP``, the published class that cuts a model over ranks, and the names that scripts import beside it."""

from torch import nn

from deepspeed import comm as dist
from deepspeed.module_inject import probe
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec  # noqa: F401
from deepspeed.module_inject.block_twin import is_linear
from deepspeed.module_inject.cut_plan import cut_model, plan_of, share_counts
from deepspeed.module_inject.tensor_slicing import ReplaceWithTensorSlicing  # noqa: F401
from deepspeed.utils.param_cut import cut_of

_KV_HEADS = (
    "multi_query_group_num", "num_kv_heads", "num_key_value_heads", "num_attention_heads", "n_heads", "attention_heads",
)  # fmt: skip


class AutoTP:
    """Cuts ``module`` over the ranks that ``set_tensor_parallel_config`` names.

    Args:
        all_reduce_linears: ends of the names of the linear layers whose results are summed; empty: the analysis of the
            model finds them, or ``partition_config`` names them.
        prefix: of the names in ``state_dict``, whose weights the module gets before it is cut; None: it has them.
        linear_layer_setting: accepted, without an effect: linear layers are found by what they compute.
        orig_layer_impl: the class of the blocks that ``all_reduce_linears`` is for; None: all of them.
        keep_module_on_host: the slices stay in host memory.
        partition_config: an ``AutoTPConfig``.
    """

    def __init__(
        self,
        module,
        all_reduce_linears,
        prefix,
        state_dict,
        linear_layer_setting,
        orig_layer_impl,
        keep_module_on_host=False,
        partition_config=None,
    ):
        self.module, self.all_reduce_linears = module, tuple(all_reduce_linears or ())
        self.prefix, self.state_dict = prefix, state_dict
        self.linear_layer_setting = tuple(linear_layer_setting or ())
        self.orig_layer_impl, self.keep_module_on_host = orig_layer_impl, keep_module_on_host
        self.partition_config, self.linear_policies = partition_config, None
        self.mp_size, self.mp_group = 1, None

    # ---- models ------------------------------------------------------------------------------------------------------
    @staticmethod
    def in_module_list(module, module_list):
        """Whether a module of the same class is in the list."""
        return any(type(module) is type(one) for one in module_list)

    @staticmethod
    def get_module_list(model):
        """One block of each class of a model's blocks."""
        found = {}
        for block in probe.blocks_of(model).values():
            found.setdefault(type(block), block)
        return list(found.values())

    @staticmethod
    def supported(model):
        """True: every model can be analysed; what cannot be cut stays whole. ``model``: its name or the model."""
        return model is not None

    @staticmethod
    def kernel_supported(module_list):
        """False: no block has inference kernels here."""
        return False

    @staticmethod
    def get_layers(parent, module):
        """Names of the layers with weights in ``module``, each behind ``parent``."""
        layers = (name for name, one in module.named_modules() if is_linear(one) or isinstance(one, nn.LayerNorm))
        return [f"{parent}.{name}" if parent else f".{name}" for name in layers]

    @staticmethod
    def update_policy_list(policy_list, new_module, new_gems):
        """Adds ``(class, names)`` to a policy, or the names to those that its class has. Returns the list."""
        for index, (kind, names) in enumerate(policy_list):
            if kind is type(new_module):
                policy_list[index] = kind, sorted({*names, *new_gems})
                return policy_list
        policy_list.append((type(new_module), list(new_gems)))
        return policy_list

    @staticmethod
    def tp_parser(model):
        """``[(class of blocks, names of the layers whose results are summed)]``, as an injection policy has them."""
        policy, ranks = [], 2
        plan = plan_of(model, ranks)
        for name, one in plan.kinds().items():
            rows = [row for group in one.groups for row in group.rows]
            if rows:
                policy = AutoTP.update_policy_list(policy, model.get_submodule(name), rows)
        if not policy:
            raise ValueError(f"no layer of {type(model).__name__} can be cut: {plan.reasons()}")
        return policy

    @staticmethod
    def get_model_num_kv_heads(config):
        """The number of key/value heads that a model's configuration says, or None."""
        values = (getattr(config, name, None) for name in _KV_HEADS)
        return next((value for value in values if value is not None), None)

    # ---- the cut -----------------------------------------------------------------------------------------------------
    def set_tensor_parallel_config(self, mp_size, mp_group):
        """The ranks that share the model."""
        self.mp_size, self.mp_group = mp_size, mp_group

    def update_linear_policies(self):
        """Makes the plan of the cut. ValueError where rules do not fit the model."""
        policy = {self.orig_layer_impl: self.all_reduce_linears} if self.all_reduce_linears else None
        self.linear_policies = plan_of(self.module, self.mp_size, self.partition_config, policy)

    def update_mp_params(self, child, name=None):
        """Gives a module this rank's share of the integers with published names (the number of heads, for example)."""
        share_counts(child, self.mp_size, dist.get_rank(self.mp_group), name)

    def _replace_module(self, r_module, prev_name="", prev_class_name=""):
        """Cuts the module, with ``state_dict``'s weights where there are some. Returns it."""
        if self.linear_policies is None:
            self.update_linear_policies()
        if self.state_dict is not None:
            start = self.prefix or ""
            state = {key[len(start) :]: one for key, one in self.state_dict.items() if key.startswith(start)}
            r_module.load_state_dict(state, strict=False)
        cut_model(r_module, self.linear_policies, self.mp_group)
        return r_module.cpu() if self.keep_module_on_host else r_module

    def register_replicated_grad_hooks(self, model):
        """Sums the gradients of whole parameters that rules mark with ``grad_allreduce`` over the ranks; the cut has
        done it already. Returns their names."""
        cuts = ((name, cut_of(param)) for name, param in model.named_parameters())
        return [name for name, cut in cuts if cut is not None and cut.partial]
