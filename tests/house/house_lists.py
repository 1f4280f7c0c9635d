"""What is allowed to break a rule of house_state.py or house_words.py, each with its reason."""


def _rows(text):
    """{(file, name): reason} of lines ``file name | reason``; a reason that is one word in capitals stands above."""
    rows = {}
    for line in text.strip().splitlines():
        place, _, reason = line.partition(" | ")
        rows[tuple(place.split())] = _REASONS.get(reason, reason)
    return rows


_REASONS = {
    "REGISTRY": "a registry: names that extensions add, read by name",
    "TORCH": "torch has one process group and one backend per process, and scripts reach them through functions",
    "CACHE": "read once: the same for every configuration of a process",
    "NUMBERS": "published: scripts name optimizers by numbers of their own",
    "FUNCTION": "published: a function without an object; it keeps worker threads, no results",
    "AT_END": "what the end of the program still has to wait for or to close",
    "VERBS": "published: the verbs of torch.cuda",
    "NCCL": "NCCL's calls by their names",
}

# file of python/deepspeed, name: state of a module that outlives a call.
PYTHON_STATE = _rows(
    """
engine/parts/outputs.py _owners | two engines of a process must not write one file
log.py _said | sentences that are printed once per process
accelerator/real_accelerator.py _current | published: get_accelerator() and set_accelerator() are one pair
accelerator/real_accelerator.py accelerators | REGISTRY
activation_checkpointing/hidden_states.py _active | contexts that are open: saved tensors are marked for all of them
activation_checkpointing/settings.py current | published: checkpointing.configure() is of the module
activation_checkpointing/settings.py thread | what a thread recomputes right now
checkpoint/engines/__init__.py ENGINES | REGISTRY
pipe/p2p.py _grid | published: p2p.init_process_groups(grid) is of the module
pipe/p2p.py _pending | published: p2p.wait() is of the module
checkpoint/layouts/storage.py _trusted | whether the reader further up the same call trusts pickles
checkpoint/write/background.py _folders | two engines of a process must not write into one folder
checkpoint/write/background.py _unsettled | AT_END
checkpoint/write/file_writer.py files | one pool of threads that read and write; DS_IO_FAULT is of the process
checkpoint/write/owner.py _held | files locked by this process: the kernel counts locks by process
checkpoint/write/snapshot.py _flying | AT_END
comm/group_communicators.py _known | what is known of torch's groups, which hold no attributes
comm/collectives.py VERBS | REGISTRY
comm/group_communicators.py native_backends | REGISTRY
comm/comms_log.py comms_logger | published: deepspeed.comm.comms_logger
comm/held.py _held | communicators of native objects, which hold no attributes
comm/mesh.py _made | every group is known by its ranks and made once
comm/process_group.py _keeper | AT_END
comm/process_group.py cdb | TORCH
comm/timed.py _listening | published: the log of operations is of the process
comm/timed.py call_log | published: the log of operations is of the process
comm/timeouts.py _configured | TORCH
comm/timeouts.py _given | TORCH
comm/watch.py _listeners | engines of the process that hear when another rank asks for its stacks
comm/watch.py _watches | two watch threads for all communicators of a process
config/model.py _layouts | CACHE
config/read.py _other_names | CACHE
config/read.py _variables | CACHE
engine/cross_engine_scaling.py _engines | engines that meet in one graph have to find each other
engine/members.py engine_parts | REGISTRY
engine/members.py pipeline_parts | REGISTRY
data/loader_workers.py _iterators | AT_END
launcher/runners/__init__.py RUNNERS | REGISTRY
module_inject/tp_init.py _recorded | published: tp_model_init() comes before initialize(), and no object joins them
module_inject/layers.py _mode | published: set_autotp_mode() and is_autotp_training_mode() are of the module
module_inject/tp_shard.py _n_embd | published: set_n_embd() and its getter are of the module
module_inject/tp_shard.py num_kv_heads | published: scripts read the name and set it by set_num_kv_heads()
module_inject/tp_shard.py tp_grain_size | published: scripts read the name and set it by set_tp_grain_size()
monitor/monitor.py MONITORS | REGISTRY
ops/by_name.py HOST_OPTIMIZERS | REGISTRY
ops/by_name.py OPTIMIZERS | REGISTRY
ops/op_builder/jit.py _loaded | a library can be imported once per process
ops/op_builder/prebuilt/cpu_adagrad.py _handles | NUMBERS
ops/op_builder/prebuilt/cpu_adam.py _handles | NUMBERS
ops/op_builder/prebuilt/cpu_lion.py _handles | NUMBERS
ops/op_builder/prebuilt/fused_adam.py _stepper | FUNCTION
ops/op_builder/prebuilt/fused_lamb.py _stepper | FUNCTION
ops/op_builder/prebuilt/fused_lion.py _stepper | FUNCTION
profiling/op_costs.py _formulas | REGISTRY
utils/expert_groups.py _state | published: deepspeed.utils.groups is a module of getters
utils/groups.py _overrides | published: set_tensor_model_parallel_rank(), ..._world_size() and their getters
utils/groups.py mesh_device | published: deepspeed.utils.groups.mesh_device
utils/pin_memory_tracker.py _tracker | published: track_pinned_memory() and pinned_memory_summary() are of the module
utils/random_state.py _tracker | published: get_cuda_rng_tracker(), as Megatron's
zero/optimizers/flat_states.py _makers | a registry: how an optimizer class of torch makes its states
zero/init/init_context.py _nesting | zero.Init replaces functions of torch while any of its contexts is open
zero/init/init_context.py sharding.gather_while_building | set while a context of zero.Init is open
zero/init/initializers.py sharding.gather_while_building | set while a context of zero.Init is open
zero/gathers/linear.py _users | torch.nn.functional.linear is replaced once, while any engine needs it
zero/parameters/sharded_parameter.py _ids | numbers of parameters are unique in a process
"""
)

# file, class: more than 25 methods.
WIDE_CLASSES = _rows(
    """
accelerator/abstract_accelerator.py DeepSpeedAccelerator | VERBS
accelerator/cuda_accelerator.py CUDA_Accelerator | VERBS
checkpoint/deepspeed_checkpoint.py DeepSpeedCheckpoint | published: what conversion scripts call
comm/nccl.py NcclCommunicator | NCCL
comm/torch.py TorchBackend | published: torch.distributed's functions as methods
ops/op_builder/builder.py OpBuilder | published: what builders of other packages override and call
comm/communicator.h Communicator | a helper for each verb over one run()
comm/nccl/nccl_comm.h NcclComm | NCCL
comm/transports/c10d_communicator.cpp C10dCommunicator | overrides each virtual function of Communicator
comm/scripts/c10d_backend.cpp C10dBackend | overrides each virtual function of c10d::Backend
config/field.h Field | one method for each thing that can be said about a key
formats/graph_builder.h GraphBuilder | a visitor: one method for each kind of pickled value
storage/memory_accounts.h MemoryAccounts | bytes, waits and transfers are counted under one lock
storage/shard_storage.h ShardStorage | all that can be asked of the memory of an engine
zero/gradients/grad_reducer.h GradReducer | one reduction: hooks' entries, order of buckets and wires share its state
zero/gathers/param_gatherer.h ParamGatherer | uses, holders, prefetch and order of gathers share one table of units
zero/device_context.h DeviceContext | the device of an engine: kernels, launches, scratch, numbers for the host
zero/spaces/param_store.h ParamStore | questions about spaces and places that every part of the core asks
zero/spaces/sharded_param.h ShardedParam | all that can be asked of a parameter of which a rank has a slice
"""
)

# file of csrc: (places, reason). Counters, flags and rows of some bytes, and what the storage room cannot know of.
_SMALL = "numbers for each parameter or rank, some bytes"
_CALL = "alive for one call only; who calls is Python or a checkpoint"
_WIRE = "the transport below moves tensors of one dtype, device or layout: a copy that lives as long as the call"
ALLOCATIONS = {
    "comm/compressed/sign_exchange.cpp": (6, "rows of signs, of one bit for each element; a slice and its scales"),
    "zero/step/compressed_step.cpp": (4, "what a bucket sends; errors of slices; a sum; weights in a save"),
    "zero/step/parameter_sums.cpp": (1, "some numbers for each parameter"),
    "comm/calls/numbers.cpp": (1, "numbers of all ranks in host memory"),
    "zero/offload/auto_placements.cpp": (1, "six numbers, which ranks compare"),
    "zero/gradients/audit.cpp": (3, "flags of some bytes; whole gradients for as long as the audit runs"),
    "zero/gradients/bucket_reduction.cpp": (1, "a late round, which no plan knew of"),
    "zero/gradients/grad_slots.cpp": (1, "128 KB of zeros, which are copied to padding"),
    "zero/gradients/ways/blocks.cpp": (1, "codes of values that come through the host"),
    "zero/gradients/ways/reduce_way.cpp": (2, "a row of a late round, and one that comes through the host"),
    "zero/device_context.cpp": (6, "sums, step scale and the kernels' own workspace; copies in another layout"),
    "zero/any_kernels.cpp": (2, "a number for each run of a sum; magnitudes whose columns are added up"),
    "zero/engine.cpp": (2, "the arena in which storage takes planes where peers read them"),
    "zero/spaces/mesh_spaces.cpp": (2, "messages to other ranks, before there is a storage"),
    "zero/spaces/param_store_homes.cpp": (1, "old values that somebody else has kept: the memory is theirs"),
    "zero/gradients/flag_exchange.cpp": (1, _SMALL),
    "zero/gradients/agreement.cpp": (3, _SMALL),
    "zero/gradients/grad_reducer.cpp": (1, "a late gradient, which no plan knew of"),
    "zero/states/group_cut.cpp": (4, _CALL),
    "zero/step/matrix_step.cpp": (2, "whole matrices of Muon, one at a time"),
    "zero/gradients/nonfinite_grads.cpp": (1, _SMALL),
    "zero/step/norm_sums.cpp": (1, "a sum of squares for each space"),
    "zero/spaces/param_store.cpp": (6, "buffers of spaces, made once for a run"),
    "zero/gathers/sources/scheduled_source.cpp": (2, _SMALL),
    "zero/gathers/sources/staged_gather.cpp": (3, "rows above what the pool keeps; notes of some bytes"),
    "zero/spaces/sharded_param.cpp": (7, "slices of parameters that no engine has yet; copies in another form or layout"),
    "zero/gathers/slice_memory.cpp": (3, "the arena of slices and copies where peers read them; a number; rows for a moment"),
    "zero/gathers/sources/peer_source.cpp": (1, "values that are compared with gathered ones"),
    "zero/gradients/sparse_rows.cpp": (3, "rows of an embedding: how many is known when the gradient is there"),
    "zero/states/state_access.cpp": (5, _CALL),
    "zero/step/stepper.cpp": (5, "counters and sums; gradients in fp32 where they are kept in 16 bits"),
    "zero/step/strategies/zenflow.cpp": (1, "a count for each parameter"),
    "zero/step/strategies/zenflow_choice.cpp": (3, "sums of columns, while they are chosen; sums of squares"),
    "zero/torch_scratch.cpp": (1, "what a kernel asks for while it runs, from torch's allocator"),
    "comm/pipe/pipe_channel.cpp": (2, "notes of some bytes; words by which ranks find out who reads whose memory"),
    "comm/pipe/pipe_inbox.cpp": (1, "notes of some bytes, on the device that carries them"),
    "comm/pipe/pipe_message.cpp": (1, "activations, which the graph of the stage keeps, as it does those made here"),
    "comm/pipe/receive_buffers.cpp": (3, "the same on the host, used again when nobody has them any more"),
    "comm/calls/compose.cpp": (7, _WIRE),
    "comm/hosts/host_exchange.cpp": (2, "a leader's rows between hosts, of the largest exchange; nothing, of a dtype"),
    "comm/calls/list_calls.cpp": (1, _WIRE),
    "comm/shared_memory/process_peer_memory.cpp": (2, _SMALL),
    "comm/transports/c10d_communicator.cpp": (1, _WIRE),
    "comm/transports/hierarchical_communicator.cpp": (6, _WIRE),
    "comm/transports/local_communicator.cpp": (1, "memory of peers where there is one rank"),
    "comm/transports/nccl_communicator.cpp": (1, _WIRE),
    "comm/transports/thread_communicator.cpp": (3, "ranks as threads, for tests"),
}

# {file: reason}: longer than MAX_LINES of house_state.py.
LONG_FILES = {}

_CORE = ("csrc/", "python/")
_ALL = ("csrc/", "python/", "docs/", "tests/")
# (pattern, where it may not stand, what the thing is called).
OLD_WORDS = (
    (r"(?i)\bvoices?\b|\bVoice", _ALL, "DiagnosticCallbacks"),
    (r"\bAside\b|\baside_\w", _ALL, "BlockingRegion"),
    (r"(?i)\bgreetings?\b", _ALL, "FingerprintExchange"),
    (r"\bIntroduction\b", ("csrc/", "python/", "tests/"), "Rendezvous"),
    (r"(?i)\bpatience\b(?!=)", _ALL, "timeout"),
    (r"(?i)\bculprits?\b", _ALL, "nonfinite gradient"),
    (r"(?i)\bposes?\b|\bwith_pose", _CORE, "with_shape_only"),
    (r"\bjoined\.py\b|\bzero[./]joined\b|\bimport joined\b", _ALL, "cross_engine_scaling"),
    (r"\bletting_go\b", _ALL, "finalizers"),
    (r"\bHold\b|\bStateHold\b|\bstate_hold\b", ("csrc/",), "a read lease"),
    (r"(?i)\bcarriers?\b", ("csrc/",), "a wire buffer"),
    (r"(?i)\blandings?\b|\blanding_\w", _ALL, "a receive buffer"),
    (r"\bhand_out_grads\b", _ALL, "assign_optimizer_grads"),
    (r"\bpart_grads\b", _ALL, "split_grad_buffer"),
    (r"\bjoin_grads\b", _ALL, "alias_grad_buffer"),
    (r"\b(Padded)?Journey\b", _ALL, "TokenDispatcher"),
    (r"\bCarrier\b", ("python/", "docs/"), "GroupCommunicator"),
    (r"\bunheard\b", _ALL, "suppress_logging"),
    (r"\blauncher[./]by_hand\b|\brun_by_hand\b", _ALL, "launcher/no_ssh.py"),
    (r"\bAlarm\b", _ALL, "ErrorPropagation"),
    (r"\b(FireCounter|fire_counter)\b", _ALL, "GradUseCounter"),
    (r"\blet_states_go\b", _ALL, "release_states"),
    (r"\bcounts_in_norm\b", _ALL, "SpaceRanks::norm_over"),
    (r"model_parallel|\bsum_of_squares\b", ("csrc/zero/",), "SpaceRanks::norm_over"),
    (
        r"setattr\(torch\.distributed|setattr\(dist\b",
        ("python/",),
        "observers of torch (csrc/comm/decorators/torch_calls.h)",
    ),
    (r"\bshm_backend\b|\bShmBackend\b", _ALL, "c10d_backend"),
    (
        r"\bPackedChunks\b|\bExchangePacked\b|\bkExchangePacked\b|\bexchange_packed\b|\bgather_packed\b|\bChunkScales\b",
        _ALL,
        "all_to_all and all_gather of rows of bytes (csrc/kernels/codes.h)",
    ),
    (
        r"\btorch\.save\(",
        (
            *(f"python/deepspeed/checkpoint/{room}/" for room in ("convert", "engines", "layouts", "read")),
            *(f"python/deepspeed/{room}" for room in ("checkpoint/ds", "engine/", "pipe/", "zero/")),
        ),
        "TorchSaveFile of checkpoint/write/file_writer.py",
    ),  # fmt: skip
    (r"\bstorage\.write\(", ("python/",), "replace_file of checkpoint/write/file_writer.py"),
    (
        r"c10d::ProcessGroup",
        ("csrc/bindings/engine/engine.", "csrc/bindings/comm/process_mesh."),
        "a communicator of the mesh",
    ),
)

# Transports whose ranks cannot be threads: (the test that runs every verb, why).
TRANSPORTS_TESTED_ELSEWHERE = {
    "c10d": ("tests/dist/test_comm_verbs.py", "torch's groups want a process for each rank; 1 to 4 of them"),
    "counted": ("tests/cpp/comm/counted_communicator_test.cpp", "it moves no data: its other ranks do not exist"),
}

# file of python/deepspeed, call: what may read pickles that run code. Each reads a file that the user has named.
UNPICKLING = _rows(
    """
pipe/p2p.py pickle.loads | published: recv_obj returns the object that a rank of the same job has pickled
planner/child.py pickle.loads | the result of a process that this one has started, over a pipe of their own
planner/child.py pickle.load | what the process that has started this one gives it, over a pipe of their own
planner/world.py pickle.loads | what ranks that are planned with this one tell, over a file in a folder of their own
formats/standalone_reader.py pickle.Unpickler | zero_to_fp32.py with trust, for files that the user says are safe
formats/standalone_reader.py pickle._Unpickler | the reader that knows a table of names and refuses all others
"""
)

# file of csrc, beginning of the line: products of sizes of tensors that exist, whose bytes torch has counted.
SIZES_OF_TENSORS = {
    ("bindings/ops/routes.cpp", "const int64_t in = from.size(1)"),
    ("bindings/ops/routes.cpp", "return static_cast<char*>(t.data_ptr())"),
    ("storage/flat_view.h", "return memory.numel()"),
    ("storage/tensor_io.cpp", "return flat_view(tensor, tensor.storage_offset()"),
}
