"""Configurations that are wrong, each with what the message must suggest: (name, config, words, world)."""

NAN, INF = float("nan"), float("inf")
OK = {"train_batch_size": 8}


def case(name, words, world=1, whole=None, **keys):
    return name, ({**OK, **keys} if whole is None else whole), [words] if isinstance(words, str) else words, world


def zero(**keys):
    return {"zero_optimization": keys}


def fp16(**keys):
    return {"fp16": {"enabled": True, **keys}}


BROKEN = [
    # Misspelt keys, at every depth.
    case("top: transposed", "gradient_clipping", gradient_clippnig=1.0),
    case("top: one letter less", "train_micro_batch_size_per_gpu", train_micro_batch_size_per_gp=2),
    case("top: plural", "steps_per_print", steps_per_prints=10),
    case("top: section name", "zero_optimization", zero_optimisation={"stage": 0}),
    case("top: fp61", "fp16", fp61={"enabled": True}),
    case("top: schedular", "scheduler", schedular={"type": "WarmupLR"}),
    case("top: optimiser", "optimizer", optimiser={"type": "Adam"}),
    case("zero: stge", "stage", **zero(stge=0)),
    case("zero: bucket", "reduce_bucket_size", **zero(reduce_bucketsize=100)),
    case("zero: overlap", "overlap_comm", **zero(overlap_com=True)),
    case("zero: key of the top", "gradient_clipping", **zero(gradient_clipping=1.0)),
    case("fp16: window", "loss_scale_window", **fp16(loss_scale_windw=100)),
    case("fp16: hysterisis", "hysteresis", **fp16(hysterisis=2)),
    case("bf16: enable", "enabled", bf16={"enable": True}),
    case("offload: device", "device", **zero(offload_optimizer={"devise": "none"})),
    case("offload: pin", "pin_memory", **zero(offload_param={"pin_mem": True})),
    case("params: learning rate", "lr", optimizer={"type": "Adam", "params": {"lrr": 0.1}}),
    case("params: weight decay", "weight_decay", optimizer={"type": "AdamW", "params": {"weight_decy": 0.1}}),
    case("scheduler params", "warmup_num_steps", scheduler={"type": "WarmupLR", "params": {"warmup_steps": 10}}),
    case("checkpoint: nested", "pipeline_stage", checkpoint={"parallel_write": {"pipeline_stages": False}}),
    case(
        "compression: depth 3",
        "quantize_groups",
        compression_training={"weight_quantization": {"shared_parameters": {"quantise_groups": 1}}},
    ),
    case("data: depth 4", "max_tokens", data_efficiency={"data_sampling": {"dynamic_batching": {"max_token": 8}}}),
    case("data_types", "grad_accum_dtype", data_types={"grad_acum_dtype": "fp32"}),
    case("timers", "synchronized", timers={"throughput": {"synchronised": True}}),
    # Misspelt names.
    case("optimizer AdmaW", "AdamW", optimizer={"type": "AdmaW"}),
    case("optimizer sgd", "SGD", optimizer={"type": "sgd"}),
    case("scheduler WarmupLr", "WarmupLR", scheduler={"type": "WarmupLr"}),
    case("scheduler Cosine", "WarmupCosineLR", scheduler={"type": "WarmupCosinLR"}),
    case("LoCo without codes", "zero_quantized_gradients", **zero(stage=2, zeropp_loco_param={"err_beta": 0.8})),
    case("device cup", "cpu", **zero(offload_optimizer={"device": "cup"})),
    case("dtype bfp16", "bf16", communication_data_type="bfp16"),
    case("tag validation", "IGNORE", checkpoint={"tag_validation": "IGNOR"}),
    case("log level", "WARNING", log_level="warn!ng"),
    case("warmup type", "linear", scheduler={"type": "WarmupLR", "params": {"warmup_type": "liner"}}),
    # Wrong types.
    case("int as text", "without quotes", steps_per_print="10"),
    case("batch as text", "without quotes", whole={"train_batch_size": "8"}),
    case("bool as text", "true without quotes", whole={**OK, "wall_clock_breakdown": "True"}),
    case("fraction", "Did you mean 8?", whole={"train_batch_size": 8.5}),
    case("null as size", "default 500000000", **zero(reduce_bucket_size=None)),
    case("list for section", "section {...}", **zero(offload_param=[1])),
    case("bool for section", '{"enabled": true}', fp16=True),
    case("number for text", "must be a text", optimizer={"type": 3}),
    case("one beta", ["betas = [0.9]", "must have 2 items"], optimizer={"type": "Adam", "params": {"betas": [0.9]}}),
    case("three betas", "must have 2 items", optimizer={"type": "Lamb", "params": {"betas": [0.9, 0.9, 0.9]}}),
    case("one beta of Lion", "must have 2 items", optimizer={"type": "Lion", "params": {"betas": [0.9]}}),
    case("beta of 1", "less than 1", optimizer={"type": "AdamW", "params": {"betas": [0.9, 1.0]}}),
    case("negative beta", "at least 0", optimizer={"type": "AdamW", "params": {"betas": [-0.1, 0.9]}}),
    case("hysteresis 0", ["fp16.hysteresis = 0", "default is 2"], **fp16(hysteresis=0)),
    case("betas not a list", "Write [0.9]", optimizer={"type": "Adam", "params": {"betas": 0.9}}),
    case("auto left over", "trainer", whole={"train_batch_size": "auto"}),
    case("auto in params", "trainer", optimizer={"type": "AdamW", "params": {"lr": "auto"}}),
    # Ranges.
    case("negative size", "default is 500000000", **zero(allgather_bucket_size=-1)),
    case("negative clipping", "default is 1.0", gradient_clipping=-1.0),
    case("NaN", "default is 1.0", gradient_clipping=NAN),
    case("infinite scale", "default is 0", **fp16(loss_scale=INF)),
    case("negative scale", "default is 0", **fp16(loss_scale=-2)),
    case("window 0", "default is 1000", **fp16(loss_scale_window=0)),
    case("ratio above 1", "default is 1.0", **zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 1.5})),
    case("stage 4", "0, 1, 2, 3", **zero(stage=4)),
    # Batch sizes.
    case("batch: nothing", "train_micro_batch_size_per_gpu", whole={}),
    case(
        "batch: triple",
        ["train_batch_size 16", "train_micro_batch_size_per_gpu 1"],
        world=4,
        whole={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
    ),
    case("batch: world", ["6 or 9"], world=3, whole={"train_batch_size": 8}),
    case(
        "batch: micro",
        ["train_micro_batch_size_per_gpu 2 or 5"],
        whole={"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3},
    ),
    case("batch: zero", "at least 1", whole={"train_batch_size": 8, "gradient_accumulation_steps": 0}),
    # Rules between keys.
    case("fp16 and bf16", "Switch one of them off", fp16={"enabled": True}, bf16={"enabled": True}),
    case("offload without ZeRO", "zero_optimization.stage", **zero(stage=0, offload_optimizer={"device": "cpu"})),
    case("nvme without a path", "nvme_path", **zero(stage=3, offload_param={"device": "nvme"})),
    case("old and new name", "Keep", **zero(stage=2, cpu_offload=True, offload_optimizer={"device": "none"})),
    case("two names of one key", "Keep", **zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2)),
    case(
        "master weights without ZeRO",
        "zero_optimization.stage",
        bf16={"enabled": True, "bf16_master_weights_and_grads": True},
    ),
    case("max_grad_norm", "gradient_clipping", optimizer={"type": "Adam", "params": {"max_grad_norm": 1.0}}),
    case("fused without torch_adam", "torch_adam", optimizer={"type": "Adam", "params": {"fused": True}}),
    case("params without a type", "optimizer.type", optimizer={"params": {"lr": 0.1}}),
    case("1-bit with ZeRO", "another optimizer", optimizer={"type": "OneBitAdam"}, **zero(stage=2)),
    case("missing total", "total_num_steps", scheduler={"type": "WarmupDecayLR", "params": {}}),
    case("missing rates", "cycle_max_lr", scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}),
]
