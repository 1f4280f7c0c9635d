"""The parts of both ports that belong to DeepSpeed alone: flags, layers, agreement of flags and configuration."""

import sys

import bert
import deepspeed
from bert_training import add_flags, given
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.progressive_layer_drop import convert_to_pld

MEMORY = ("attention_dropout_checkpoint", "gelu_checkpoint", "normalize_invertible")
FLAGS = {
    "--local_rank": dict(type=int, default=-1, help="set by the launcher"),
    "--deepspeed_transformer_kernel": dict(action="store_true", help="use deepspeed.DeepSpeedTransformerLayer"),
    **{f"--{name}": dict(action="store_true", help="of the kernel: less memory, more time") for name in MEMORY},
    "--progressive_layer_drop": dict(action="store_true", help="leave out layers, as the configuration says"),
}


def add_arguments(parser):
    return add_flags(parser, FLAGS)


def read_configuration(args):
    """Starts the process group, and reads the configuration file into ``args``."""
    if not args.deepspeed_config:
        sys.exit("ds.py needs a configuration: --deepspeed --deepspeed_config ds_config.json")
    deepspeed.init_distributed()
    args.settings = DeepSpeedConfig(args.deepspeed_config)
    args.rank, args.world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    micro, predicted = args.settings.train_micro_batch_size_per_gpu, getattr(args, "predict_batch_size", 0)
    if args.deepspeed_transformer_kernel and predicted > micro:
        sys.exit(
            f"--predict_batch_size {predicted} is larger than train_micro_batch_size_per_gpu {micro}, which is the "
            "largest batch of --deepspeed_transformer_kernel"
        )
    return args


def make_layer(args):
    """The function that makes a layer of a BertConfig: a plain one, or one of the transformer kernel."""
    flags = {name: getattr(args, name) for name in MEMORY}
    if not args.deepspeed_transformer_kernel:
        if any(flags.values()):
            sys.exit(f"--{max(flags, key=flags.get)} is a flag of the kernel: give --deepspeed_transformer_kernel, too")
        return bert.Layer

    def make(config):
        kernel_config = deepspeed.DeepSpeedTransformerConfig(
            batch_size=args.settings.train_micro_batch_size_per_gpu,
            max_seq_length=args.max_seq_length,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads,
            attn_dropout_ratio=config.attention_probs_dropout_prob,
            hidden_dropout_ratio=config.hidden_dropout_prob,
            num_hidden_layers=config.num_hidden_layers,
            initializer_range=config.initializer_range,
            layer_norm_eps=config.layer_norm_eps,
            pre_layer_norm=config.pre_layer_norm,
            local_rank=args.local_rank,
            attn_dropout_checkpoint=args.attention_dropout_checkpoint,
            gelu_checkpoint=args.gelu_checkpoint,
            normalize_invertible=args.normalize_invertible,
        )
        kernel_config.activation = "gelu_tanh" if bert.gelu_of(config) == "tanh" else "gelu"
        return deepspeed.DeepSpeedTransformerLayer(kernel_config)

    return make


def with_momentum_mask(args, network, groups):
    """The groups for a 1-bit optimizer: the positions behind ``--max_seq_length`` have no gradient, which signs cannot
    say, so their table gets a group of its own with a mask."""
    name = args.settings.optimizer_name or ""
    table = network.bert.embeddings.position_embeddings.weight
    if name not in ("onebitadam", "onebitlamb", "zerooneadam") or args.max_seq_length == table.shape[0]:
        return groups
    mask = table.new_zeros(table.shape)
    mask[: args.max_seq_length] = 1
    first, second = groups
    masked = {"params": [table], "weight_decay": first["weight_decay"], "exp_avg_mask": mask}
    return [{**first, "params": [param for param in first["params"] if param is not table]}, second, masked]


def drop_layers(args, network):
    """Progressive layer dropping: the flag and the section of the configuration belong together."""
    enabled = args.settings.pld_enabled
    if args.progressive_layer_drop != enabled:
        state = "is not given, and" if enabled else "is given, and"
        sys.exit(f"--progressive_layer_drop {state} progressive_layer_drop.enabled is {str(enabled).lower()}")
    if enabled:
        if not network.bert.encoder.layer[0].config.pre_layer_norm:
            sys.exit("--progressive_layer_drop needs layers with the norm in front: pre_layer_norm in the file of --cf")
        convert_to_pld(network, type(network.bert.encoder.layer[0]))


def agree(args, engine, optimizer):
    """Batch, clipping, precision and learning rate are those of the configuration. A flag that says something else ends
    the program; then ``args`` get the values of the engine."""
    own = {
        "train_batch_size": engine.train_batch_size(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
        "max_grad_norm": engine.gradient_clipping(),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "fp16": engine.fp16_enabled(),
        "loss_scale": args.settings.float16_config.loss_scale,
        "delay_allreduce": not engine.zero_overlap_comm(),
    }
    for name, value in own.items():
        if given(args, name) and getattr(args, name) != value:
            flag = f"--{name} {getattr(args, name)}"
            sys.exit(f"{flag}: {args.deepspeed_config} says {value}. Change it, or leave the flag out.")
        setattr(args, name, value)
    args.device = engine.device
    if engine.lr_scheduler is not None and (getattr(args, "lr_schedule", None) or getattr(args, "lr_offset", 0)):
        sys.exit(f"--lr_schedule and --lr_offset: {args.deepspeed_config} has a scheduler, too. Use one of them.")
