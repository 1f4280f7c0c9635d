"""The configuration of a transformer layer."""

import json

from deepspeed.log import logger


class TransformerConfig:
    """The sizes of a layer, its dropout and its initial values; -1 stands for what was not given."""

    def __init__(
        self,
        batch_size,
        hidden_size,
        intermediate_size,
        heads,
        attn_dropout_ratio,
        hidden_dropout_ratio,
        num_hidden_layers,
        initializer_range,
    ):
        self.layer_id = -1
        self.batch_size = batch_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.heads = heads
        self.attn_dropout_ratio = attn_dropout_ratio
        self.hidden_dropout_ratio = hidden_dropout_ratio
        self.num_hidden_layers = num_hidden_layers
        self.initializer_range = initializer_range


class DeepSpeedTransformerConfig(TransformerConfig):
    """The sizes, dropout and memory flags of a ``DeepSpeedTransformerLayer``.

    Args:
        batch_size: the largest number of sequences of a call; -1: any.
        hidden_size, heads: ``heads`` divides ``hidden_size``. intermediate_size: -1: 4 * ``hidden_size``.
        attn_dropout_ratio, hidden_dropout_ratio: 0 to 1, or -1 for none.
        num_hidden_layers: layers of the model; with ``adjust_init_range`` the initial weights of the projections onto
            the residual are divided by sqrt(2 * ``num_hidden_layers``).
        initializer_range: the standard deviation of initial weights; -1: 0.02. seed: with the number of the layer it
            makes the initial values; -1: torch's generator does.
        layer_norm_eps: added to the variance of norms. pre_layer_norm: norms stand before attention and feed-forward
            network, else behind them.
        normalize_invertible, gelu_checkpoint, attn_dropout_checkpoint: memory for time, with the same gradients: the
            inputs of norms, the result of GELU, the result of attention are computed again instead of kept.
        stochastic_mode: accepted; the kernels are the reproducible ones. fp16, local_rank: accepted; a layer computes
            in the dtype and on the device of its parameters.
        return_tuple: a layer returns a tuple of one tensor. training: whether the layer begins in training mode.
        max_seq_length: the most tokens of a sequence; -1: any.

    ``activation`` ("gelu_tanh"), an attribute, may be "gelu" or "relu".
    """

    def __init__(
        self,
        batch_size=-1,
        hidden_size=-1,
        intermediate_size=-1,
        heads=-1,
        attn_dropout_ratio=-1,
        hidden_dropout_ratio=-1,
        num_hidden_layers=-1,
        initializer_range=-1,
        layer_norm_eps=1e-12,
        local_rank=-1,
        seed=-1,
        fp16=False,
        pre_layer_norm=True,
        normalize_invertible=False,
        gelu_checkpoint=False,
        adjust_init_range=True,
        attn_dropout_checkpoint=False,
        stochastic_mode=False,
        return_tuple=False,
        training=True,
        max_seq_length=-1,
    ):
        super().__init__(
            batch_size,
            hidden_size,
            intermediate_size if intermediate_size != -1 or hidden_size == -1 else 4 * hidden_size,
            heads,
            attn_dropout_ratio,
            hidden_dropout_ratio,
            num_hidden_layers,
            initializer_range,
        )
        self.fp16 = fp16
        self.pre_layer_norm = pre_layer_norm
        self.local_rank = local_rank
        self.seed = seed
        self.normalize_invertible = normalize_invertible
        self.gelu_checkpoint = gelu_checkpoint
        self.layer_norm_eps = layer_norm_eps
        self.adjust_init_range = adjust_init_range
        self.attn_dropout_checkpoint = attn_dropout_checkpoint
        self.stochastic_mode = stochastic_mode
        self.return_tuple = return_tuple
        self.training = training
        self.max_seq_length = max_seq_length
        self.activation = "gelu_tanh"
        self.layers_made = 0

    @classmethod
    def from_dict(cls, json_object):
        """A configuration with the entries of a dict. Entries of other names become attributes, too, and a warning
        names them."""
        config = cls()
        others = sorted(set(json_object) - set(vars(config)))
        if others:
            known = ", ".join(sorted(vars(config)))
            logger.warning(f"a transformer layer does not read {', '.join(others)}; its entries are {known}")
        for key, value in json_object.items():
            setattr(config, key, value)
        if config.intermediate_size == -1 and config.hidden_size != -1:
            config.intermediate_size = 4 * config.hidden_size
        return config

    @classmethod
    def from_json_file(cls, json_file):
        """As ``from_dict``, of a file of JSON."""
        with open(json_file, encoding="utf-8") as file:
            return cls.from_dict(json.load(file))

    def check(self):
        """ValueError, with the numbers, for sizes and shares that no layer can have."""
        for name in ("hidden_size", "heads", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: a transformer layer needs a positive whole number")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of the {self.heads} heads")
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio"):
            value = getattr(self, name)
            if value != -1 and not 0 <= value < 1:
                raise ValueError(f"{name} is {value!r}: it is 0 or more and less than 1, or -1 for none")

    def share(self, name):
        """A dropout ratio, 0 where it was not given."""
        return max(0.0, float(getattr(self, name)))
