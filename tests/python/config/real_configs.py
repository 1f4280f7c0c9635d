"""Patterns of configurations from public repositories: (name, config, what is right).

What is right is a dict: ``told``: words that one warning holds, or None for no warning; ``values``: resolved values by their
dotted paths; ``left``: paths that a trainer fills in.
"""

OK = {"train_batch_size": 8}
ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}


def case(title, told=None, values=None, left=(), whole=None, **keys):
    right = {"told": told, "values": values or {}, "left": list(left)}
    return title, ({**OK, **keys} if whole is None else whole), right


def private(key, value="mine"):
    return case(f"private: {key}", told=key, **{key: value})


def comment(key):
    return case(f"comment at the top: {key}", **{key: "why"})


def zero(**keys):
    return {"zero_optimization": {"stage": 2, **keys}}


def checkpointing(**keys):
    return {"activation_checkpointing": keys}


HF = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
PARAMS = [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay")]
PARAMS += [f"scheduler.params.{key}" for key in HF["scheduler"]["params"]]
BATCH = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"]

REAL = [
    *map(private, "log name model_name job note train monitor tp pp dp id ema seed lr".split()),
    *map(
        private,
        "dataset epochs eval_interval output_dir wandb_project tokenizer tokens model mode comment map timer".split(),
    ),
    *map(comment, ("_comment", "#", "# see the wiki", "//", "_note")),
    case("comment in a section", "_comment", **zero(_comment="two hosts")),
    case("comment in fp16", "//", fp16={"enabled": False, "//": "slow here"}),
    case("trainer: all auto", left=PARAMS + BATCH + ["gradient_clipping"], whole=HF),
    case("trainer: no batch size", left=BATCH, whole={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    case("trainer: accumulation only", left=[*BATCH], whole={"gradient_accumulation_steps": 4}),
    case("trainer: clipping", left=["gradient_clipping"], gradient_clipping="auto"),
    case("trainer: learning rate", left=PARAMS[:1], optimizer={"type": "Adam", "params": {"lr": "auto"}}),
    case(
        "contiguous without a count", **checkpointing(contiguous_memory_optimization=True, partition_activations=True)
    ),
    case("contiguous alone", **checkpointing(contiguous_memory_optimization=True)),
    case("a key of Megatron", "checkpoint_in_cpu", **checkpointing(checkpoint_in_cpu=False)),
    case(
        "quantization_period 0",
        compression_training={
            "weight_quantization": {
                "shared_parameters": {"enabled": False},
                "different_groups": {
                    "wq1": {
                        "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                        "modules": ["attention.self"],
                    }
                },
            }
        },
    ),
    *(
        case(f"optimizer.{key}", 'belongs into "optimizer.params"', optimizer={**ADAM, key: value})
        for key, value in {"eps": 1e-8, "weight_decay": 0.1, "adam_w_mode": True, "lr": 1e-3}.items()
    ),
    case("optimizer: private", "name", optimizer={**ADAM, "name": "mine"}),
    case("scheduler: rate outside", "scheduler.params", scheduler={"type": "WarmupLR", "warmup_num_steps": 10}),
    case("scheduler: private", "interval", scheduler={"type": "WarmupLR", "params": {}, "interval": "step"}),
    case("checkpoint: private", "save_dir", checkpoint={"save_dir": "out"}),
    case("flops_profiler: private", "warm_up", flops_profiler={"enabled": False, "warm_up": 3}),
    case("data_efficiency: private", "author", data_efficiency={"enabled": False, "author": "x"}),
    case(
        "torch_adam as a text",
        "is read as true",
        {"optimizer.params.torch_adam": True},
        optimizer={"type": "Adam", "params": {"torch_adam": "torch_impl"}},
    ),
    case(
        "warmup_type cosine",
        'is read as "log"',
        {"scheduler.params.warmup_type": "log"},
        scheduler={"type": "WarmupLR", "params": {"warmup_type": "cosine"}},
    ),
    *(case(f"autotp_size {size}", tensor_parallel={"autotp_size": size}) for size in (0, 1)),
    *(
        case(f"bf16.{key}", "without a loss scale", bf16={"enabled": True, key: value})
        for key, value in {
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        }.items()
    ),
    case("bf16.auto_cast", "auto_cast", bf16={"enabled": True, "auto_cast": True}),
    case("fp16.fp16", "fp16.enabled", fp16={"enabled": True, "fp16": True}),
    case("fp16.opt_level", "apex", fp16={"enabled": True, "opt_level": "O2"}),
    case("fp16.min_loss_scale", None, {"fp16.min_loss_scale": 0.5}, fp16={"enabled": True, "min_loss_scale": 0.5}),
    case("fp16.min_loss_scale, whole", None, {"fp16.min_loss_scale": 1}, fp16={"enabled": True, "min_loss_scale": 1}),
    case(
        "cpu_offload_params",
        "deprecated",
        {"zero_optimization.offload_param.device": "cpu"},
        zero_optimization={"stage": 3, "cpu_offload_params": True},
    ),
    case(
        "persitance",
        "persistence_threshold",
        {"zero_optimization.stage3_param_persistence_threshold": 7},
        zero_optimization={"stage": 3, "stage3_param_persitance_threshold": 7},
    ),
    case("grad_hooks", "grad_hooks", **zero(grad_hooks=True)),
    *(
        case(f"compile.{key}", key, compile={key: value})
        for key, value in {"backend": "inductor", "disable": True}.items()
    ),
    case(
        "contiguous_gradients",
        None,
        {"zero_optimization.contiguous_gradients": True},
        **zero(contiguous_gradients=True),
    ),
]
