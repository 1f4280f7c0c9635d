"""Rules by which parameters are cut among tensor-parallel ranks: those of a user, and those of known models."""

import dataclasses
import enum
import re

from deepspeed.config.errors import config_error
from deepspeed.config.model import section

_SECTION = "tensor_parallel.partition_config"
_PartitionSection = section("_PartitionSection", _SECTION)


class PartitionType(enum.Enum):
    """The features of a linear layer that ranks share: its outputs (``COLUMN``), its inputs (``ROW``), or none."""

    COLUMN = "column"
    ROW = "row"
    SKIP = "skip"


def _tuples(value):
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclasses.dataclass
class TPLayerSpec:
    """A rule for the cut of parameters that have certain names.

    Args:
        patterns: regular expressions for names of parameters, each from the first letter of a name on.
        shape: the sub-parameters of a fused parameter, each of which is cut by itself: ``(3, -1)`` are three of one
            size in dimension 0, ``((q, k, v), -1)`` are three of these sizes. Lists become tuples.
        partition_dim: the dimension to cut; None stands for 0 of a COLUMN and 1 of a ROW.
        model_types: values of ``config.model_type`` that the rule is for; None stands for all models.
        gather_output: every rank gets the whole output.
        grad_allreduce: the gradient is the sum of the ranks' gradients.
    """

    patterns: list[str]
    partition_type: PartitionType = PartitionType.COLUMN
    shape: tuple[int | tuple[int, ...], ...] | None = None
    partition_dim: int | None = None
    model_types: list[str] | None = None
    gather_output: bool = False
    grad_allreduce: bool = False

    def __post_init__(self):
        self.shape = _tuples(self.shape)
        for pattern in self.patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"patterns: {pattern!r} is not a regular expression: {error}") from None
        dim = self.get_partition_dim()
        if self.shape is None or dim is None:
            return
        sizes = [size for part in self.shape for size in (part if isinstance(part, tuple) else [part])]
        if not all(size == -1 or _is_size(size) for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(f"shape: {self.shape} may have sizes of at least 1, and -1 once")
        if not 0 <= dim < len(self.shape):
            raise ValueError(f"partition_dim: shape {self.shape} has no dimension {dim}")

    def get_partition_dim(self):
        """The dimension of the parameter that is cut; None where nothing is."""
        default = {PartitionType.COLUMN: 0, PartitionType.ROW: 1, PartitionType.SKIP: None}[self.partition_type]
        return default if self.partition_dim is None else self.partition_dim

    def _parts(self):
        dim = self.get_partition_dim()
        return 1 if self.shape is None or dim is None else self.shape[dim]

    def has_unequal_sub_params(self):
        """Whether ``shape`` gives each sub-parameter a size of its own."""
        return isinstance(self._parts(), tuple)

    def get_sub_param_sizes(self):
        """The sizes that ``shape`` gives the sub-parameters; None where all have one size."""
        return self._parts() if self.has_unequal_sub_params() else None

    def get_num_sub_params(self):
        """The number of sub-parameters, each of which is cut by itself."""
        parts = self._parts()
        return len(parts) if isinstance(parts, tuple) else max(parts, 1)

    def matches(self, param_name, model_type=None):
        """Whether the rule is for a parameter. ``param_name`` may leave ``.weight`` out, and so may a pattern."""
        if self.model_types and str(model_type).lower() not in [known.lower() for known in self.model_types]:
            return False
        short = param_name[: -len(".weight")] if param_name.endswith(".weight") else param_name
        names = (param_name, short, f"{short}.weight")
        return any(re.match(pattern, name) for pattern in self.patterns for name in names)


@dataclasses.dataclass
class AutoTPConfig:
    """The section ``tensor_parallel.partition_config``: rules, of which the first that fits a parameter decides.

    Args:
        use_default_specs: the rules of a known model follow those of ``layer_specs``.
        strict_mode: raises an error for a parameter without a rule.
    """

    tp_size: int = 1
    layer_specs: list[TPLayerSpec] = dataclasses.field(default_factory=list)
    embedding_partition_dim: int = 1
    lm_head_patterns: list[str] = dataclasses.field(default_factory=lambda: ["lm_head", "embed_out"])
    use_default_specs: bool = True
    strict_mode: bool = False

    def find_matching_spec(self, param_name, model_type=None):
        """The first rule that fits the parameter, or None; with ``strict_mode`` a ValueError instead of None."""
        for spec in self.layer_specs:
            if spec.matches(param_name, model_type):
                return spec
        if self.strict_mode:
            raise ValueError(
                f"{_SECTION}: no pattern of layer_specs fits the parameter {param_name!r}, and strict_mode is set. "
                'Add a pattern for it (partition_type "skip" leaves it whole), or switch strict_mode off'
            )
        return None

    @classmethod
    def from_dict(cls, config_dict):
        """The configuration of a section as it stands in a file. A wrong key or value is a DeepSpeedConfigError."""
        read = _PartitionSection(**config_dict)
        specs = []
        for index, given in enumerate(read.layer_specs):
            try:
                specs.append(TPLayerSpec(**{**given, "partition_type": PartitionType(given["partition_type"])}))
            except ValueError as error:
                key = f"{_SECTION}.layer_specs[{index}]"
                raise config_error(f"config: {key}.{error}.", [key], value=given) from None
        plain = {field.name: getattr(read, field.name) for field in dataclasses.fields(cls)}
        return cls(**{**plain, "layer_specs": specs})


def merge_autotp_configs(base, override):
    """A new configuration: the rules of ``override`` before those of ``base``, all other values of ``override``."""
    return dataclasses.replace(override, layer_specs=[*override.layer_specs, *base.layer_specs])


def _spec(partition_type, *names, **options):
    """The rule for weights whose names end with one of the regular expressions ``names``."""
    return TPLayerSpec([rf"(.*\.)?{name}\.weight$" for name in names], partition_type, **options)


def _column(*names, shape=None):
    return _spec(PartitionType.COLUMN, *names, shape=shape, partition_dim=None if shape is None else 0)


def _row(*names):
    return _spec(PartitionType.ROW, *names)


def _preset(*specs):
    return AutoTPConfig(layer_specs=list(specs))


class AutoTPPresets:
    """Rules of known models, each an ``AutoTPConfig``. Embeddings and output layers stay whole."""

    @staticmethod
    def llama():
        """Separate projections, without biases or with them."""
        return _preset(
            _column(r"self_attn\.[qkv]_proj", r"mlp\.(gate|up)_proj"), _row(r"self_attn\.o_proj", r"mlp\.down_proj")
        )

    @staticmethod
    def llama_gqa(num_heads, num_kv_heads, head_dim):
        """A fused ``qkv_proj`` with fewer key/value heads than query heads; ``gate_up_proj`` may be fused, too."""
        kv_size = num_kv_heads * head_dim
        return _preset(
            _column(r"self_attn\.qkv_proj", shape=((num_heads * head_dim, kv_size, kv_size), -1)),
            _column(r"mlp\.gate_up_proj", shape=(2, -1)),
            *AutoTPPresets.llama().layer_specs,
        )

    @staticmethod
    def bloom():
        """A fused ``query_key_value`` with the three parts of a head side by side."""
        return _preset(
            _column(r"self_attention\.query_key_value", r"mlp\.dense_h_to_4h"),
            _row(r"self_attention\.dense", r"mlp\.dense_4h_to_h"),
        )

    @staticmethod
    def chatglm():
        """The same names, and a gate in the first half of ``dense_h_to_4h``."""
        return _preset(
            _column(r"self_attention\.query_key_value"),
            _column(r"mlp\.dense_h_to_4h", shape=(2, -1)),
            _row(r"self_attention\.dense", r"mlp\.dense_4h_to_h"),
        )

    @staticmethod
    def mixtral():
        """Each expert is cut; the router stays whole."""
        experts = r"block_sparse_moe\.experts\.\d+"
        return _preset(
            _column(r"self_attn\.[qkv]_proj", rf"{experts}\.w[13]"),
            _row(r"self_attn\.o_proj", rf"{experts}\.w2"),
            _spec(PartitionType.SKIP, r"block_sparse_moe\.gate"),
        )

    @staticmethod
    def deepseek_v2():
        """Attention over compressed keys and values, whose compression stays whole; experts beside dense layers."""
        mlp = r"mlp(\.shared_experts|\.experts\.\d+)?"
        return _preset(
            _column(r"self_attn\.(q_proj|q_b_proj|kv_b_proj)", rf"{mlp}\.(gate|up)_proj"),
            _row(r"self_attn\.o_proj", rf"{mlp}\.down_proj"),
            _spec(PartitionType.SKIP, r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)", r"mlp\.gate"),
        )

    @staticmethod
    def qwen2():
        """The names of Llama."""
        return AutoTPPresets.llama()

    @staticmethod
    def phi3():
        """Fused ``qkv_proj``, with as many key/value heads as query heads, and ``gate_up_proj``."""
        return _preset(
            _column(r"self_attn\.qkv_proj", shape=(3, -1)),
            _column(r"mlp\.gate_up_proj", shape=(2, -1)),
            _row(r"self_attn\.o_proj", r"mlp\.down_proj"),
        )

    @staticmethod
    def get_preset(model_type):
        """The rules of a ``config.model_type``, in any case of letters; None for a model that is not known."""
        known = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
        name = str(model_type).lower()
        return getattr(AutoTPPresets, name)() if name in known else None
