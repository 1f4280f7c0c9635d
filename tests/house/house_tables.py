"""The house as tables: who may use whom, and what is allowed to break a rule, each with its reason.

docs/architecture.md tells why. Changing the house means changing a row here and that page, in the same commit.
"""

# ---- Python --------------------------------------------------------------------------------------------------------
# Floors, lowest first. A room may import rooms of lower floors, never of its own floor or above.
PYTHON_FLOORS = [
    {"constants", "version", "_build_info"},
    {"log"},
    {"registry", "host"},
    {"git_version_info"},
    {"_compat"},
    {"_native"},
    {"accelerator", "config", "formats"},
    {"comm"},
    {"utils"},
    {"ops", "optim"},
    {"zero"},
    {
        "activation_checkpointing", "checkpoint", "compile", "compression", "data", "elasticity",
        "io", "linear", "moe", "monitor", "nvme", "profiling", "sequence",
    },
    {"pipe", "module_inject"},
    {"inference"},
    {"published"},
    {"engine"},
    {"planner", "diagnosis"},
    {""},  # deepspeed/__init__.py
]  # fmt: skip

# These run on a head node, where torch may be missing: of us they import only the lowest four floors, and no torch.
HEAD_NODE_ROOMS = {"launcher", "env_report", "autotuning"}
HEAD_NODE_FLOOR = set().union(*PYTHON_FLOORS[:4])

# Import paths of existing scripts: may import anything, nobody imports them, and they define nothing.
FACADE_ROOM = "runtime"

# Classes with published constructors: they alone may take what nobody reads. Who may use them, beside the facades:
PUBLISHED_ROOM = "published"
PUBLISHED_IMPORTERS = {"engine"}
# ... and who has their names in a table, to import them when a script asks.
PUBLISHED_NAMES = {
    "__init__.py": "the public names of the package",
    "zero/__init__.py": "the public names of deepspeed.zero",
}

# Where importing by a name in a string is the point; everywhere else the import goes to the top of the file.
LATE_IMPORTS = {
    "__init__.py": "the public names: import deepspeed must be light",
    "ops/__init__.py": "op packages are imported when first used",
    "ops/op_builder/builder.py": "a third party's prebuilt op has a name that only its builder knows",
    "ops/op_builder/prebuilt_op.py": "an op's functions are imported when it is loaded: some need the native module",
    "formats/plain_classes.py": "classes that checkpoints name by their published paths, or that the user lets through",
    "accelerator/torch_module.py": "a device's package and module are optional; the table of vendors names them",
    "accelerator/hpu_accelerator.py": "as above",
    "ops/attention/table.py": "transformers is optional",
    "sequence/hf_attention.py": "transformers is optional",
    "sequence/tiling.py": "as above",
    "engine/members.py": "files of a folder register parts of engines; their own imports are checked where they stand",
    "monitor/monitor.py": "wandb, comet_ml and tensorboard are optional, and are imported on rank 0 only",
    "comm/mpi_exchange.py": "mpi4py is optional",
    "registry.py": "a registry holds names so that what is not used is not imported; so do packages (lazy_package)",
    "git_version_info.py": "_build_info exists in installed packages only",
    "accelerator/abstract_accelerator.py": "op builders and compile backends exist for some torches only",
    "accelerator/cuda_accelerator.py": "nvtx is optional",
    "utils/init_on_device.py": "torch's compiler takes a second to import, and only some torches need it here",
    "planner/cli.py": "transformers and matplotlib are optional; the user's files are imported by their path",
    "comm/process_group.py": "the bindings of a third-party backend are optional",
    "comm/rendezvous.py": "mpi4py is optional, and importing it starts MPI",
    "comm/torch.py": "torch 2.x only",
}

# Calls that make torch's groups. One file has them, so that every group is known by its ranks and made in one order.
GROUP_MAKERS = {
    "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh",
    "_new_process_group_helper",
}  # fmt: skip
MAKER_OF_GROUPS = "comm/mesh.py"

# ---- C++ -----------------------------------------------------------------------------------------------------------
CPP_ARROWS = {
    "base": set(),
    "config": {"base"},
    "plan": {"base"},
    "kernels": {"base"},
    "io": {"base"},
    "formats": {"base", "io"},
    "storage": {"base", "plan", "io"},
    "optim": {"base", "config", "kernels"},
    "comm": {"base", "plan", "kernels"},
    "parallel": {"base", "plan", "kernels", "io", "storage", "comm"},
    "zero": {"base", "config", "plan", "kernels", "optim", "io", "storage", "comm"},
    "bindings": {
        "base",
        "config",
        "plan",
        "kernels",
        "optim",
        "io",
        "formats",
        "storage",
        "comm",
        "parallel",
        "zero",
    },
}
# Folders of a room, in floors, lowest first: a folder may include of lower floors, never of its own floor or above.
# Files at the top of a room are in no folder: they may include all of it, and all of it may include them.
# fmt: off
CPP_FOLDERS = {
    "bindings": [{"config", "formats", "io", "ops", "plan"}, {"engine"}, {"comm"}],
    "comm": [
        {"segments"}, {"calls"}, {"boards"}, {"decorators", "nccl", "shared_memory"}, {"hosts", "pipe", "scripts"},
        {"compressed", "transports"},
    ],
    "config": [{"sections"}],
    "io": [{"folders", "memory"}, {"async", "zip"}],
    "kernels": [{"ref"}, {"cpu", "cuda"}],
    "plan": [{"spaces"}],
    "storage": [{"tiers"}],
    "zero": [{"offload"}, {"spaces"}, {"gathers"}, {"gradients"}, {"step"}, {"states"}],
}
# fmt: on
# The same for folders of rooms of python/deepspeed.
PYTHON_FOLDERS = {
    "checkpoint": [{"layouts"}, {"write"}, {"engines", "read"}, {"convert"}, {"save"}],
    "engine": [{"parts"}, {"pipeline_parts"}],
    "ops": [
        {"adam", "attention", "fp_quantizer", "quantizer", "random_ltd"},
        {"deepspeed4science", "sparse_attention"},
        {"transformer"},
        {"op_builder"},
        {"aio", "gds", "pin_memory"},
    ],
    "zero": [{"parameters"}, {"gathers", "states"}, {"init", "offload"}, {"optimizers"}],
}

ROOMS_WITH_TORCH = {"storage", "comm", "parallel", "zero", "bindings"}
ROOMS_WITH_PYTHON = {"bindings"}
# Highway's headers are written for quotes: it includes the file that includes it once per instruction set.
QUOTED_LIBRARIES = {"hwy": {"kernels"}}

# Every #if on a torch version: one header for c10d, one for autograd.
TORCH_VERSION_HEADERS = {"comm/c10d_compat.h", "zero/torch_compat.h"}

# (file, name): mutable state that outlives a call and is shared by all ranks of a process.
MUTABLE_GLOBALS = {
    ("bindings/module.cpp", "all"): "bindings register before main and are read once, when the module is imported",
    ("bindings/module.cpp", "config_error_type"): "an exception type of the module, which Python never unloads",
    ("base/blocking_region.cpp", "blocking_region"): "set when bindings are imported; a process has one interpreter",
    ("bindings/config/config.cpp", "assertion_type"): "as above: Python types, set once when the module is imported",
    ("bindings/config/config.cpp", "config_type"): "as above",
    ("comm/decorators/torch_calls.cpp", "only"): "torch's observers are plain functions, which get no owner",
    ("config/schema.cpp", "all"): "sections register before main and are only read afterwards",
    ("config/sections/optimizer_params.cpp", "all"): "as above: optimizer types",
    ("storage/tier.cpp", "all"): "memory tiers register before main and are only read afterwards",
    ("zero/gradients/ways/reduce_way.cpp", "all"): "ways register before main and are only read afterwards",
    ("zero/gathers/shard_source.cpp", "all"): "sources register before main and are only read afterwards",
    ("plan/spaces/space_rule.cpp", "all"): "rules register before main and are only read afterwards",
    ("zero/gradients/one_use.cpp", "outermost"): "of a thread: autograd runs hooks in it, which get no argument",
    ("zero/step/strategies/step_strategy.cpp", "all"): "strategies register before main and are only read afterwards",
    ("optim/rule.cpp", "all"): "optimizer rules register before main and are only read afterwards",
    ("kernels/cpu/load.cpp", "all"): "libraries of kernels are opened once in a process and never closed",
    ("kernels/cpu/load.cpp", "mutex"): "as above",
    ("zero/any_kernels.cpp", "found_failure"): "the last error of a thread, as CUDA has one, which the next call takes",
    ("zero/any_kernels.cpp", "told_failure"): "as above",
    ("kernels/cpu/update.cpp", "all"): "update kernels register while the library is loaded and are only read after",
    ("kernels/cuda/update.cu", "all"): "as above",
    ("kernels/ref/update.cpp", "rules"): "as above",
}

# Who compares ZeRO stages with numbers, beside the configuration.
STAGE_NUMBERS_CPP = {"zero/stage_policy.cpp": "the table itself"}
STAGE_NUMBERS_PYTHON = {
    "utils/zero_to_fp32.py": "a file format: the stage stands in the file, and the script runs without the library",
    "utils/zero_files.py": "as above",
}

# (file, name) of bindings with more arguments: why.
MAX_BINDING_ARGUMENTS = 8
WIDE_BINDINGS = {
    (
        "bindings/ops/ops_update.cpp",
        "step",
    ): "an optimizer's own call, without an engine: a list of each kind of tensor",
}
