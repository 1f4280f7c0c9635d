"""What is joined to a folder without path_below, each with the reason (``house_names.py``)."""

# {file: {expression: why no file and no socket says that name}}
_NUMBERED = "numbers of ranks, layers and turns with fixed text around them"
_LISTED = "a listing of that folder has given it"
_CALLER = "the caller's own argument, such as a tag: who calls may name any place"
_OURS = "this process has made the name"
_CHECKED = "path_below has checked it before"
JOINED_NAMES = {
    "_native.py": {"tag()": _OURS, "'_C' + suffix": _OURS},
    "checkpoint/autoep_universal.py": {
        "str(tp_index)": _NUMBERED, "state": "a name of states_below, which has listed that folder",
    },
    "checkpoint/convert/export.py": {"tag": _CALLER, "*name.split('/')": "the modules of the script, a constant"},
    "checkpoint/convert/whole_model.py": {"save_filename": _CALLER},
    "checkpoint/ds_to_universal.py": {
        "name": _LISTED,
    },
    "checkpoint/layouts/names.py": {
        "self(**numbers)": _NUMBERED,
        "checkpoint_json()": _NUMBERED, "checkpoint_json(n)": _NUMBERED, "tag": "check_tag has checked it",
    },
    "checkpoint/layouts/open_saved.py": {"files[0]": _LISTED},
    "checkpoint/layouts/saved_universal.py": {"name": _LISTED},
    "checkpoint/read/expert_states.py": {"name": _LISTED},
    "checkpoint/read/load.py": {
        "names.LATEST_UNIVERSAL if universal else names.LATEST": "constants",
        "tag": "the caller's, or of latest_tag, which has checked it", "name": "memory.parsed has compared its form",
    },
    "checkpoint/read/memory.py": {"tag": "latest_tag has checked it"},
    "checkpoint/write/verify.py": {"name": _LISTED},
    "checkpoint/utils.py": {
        "f'{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}'": _CALLER,
        "f'{layer_id}-model_{tp_rank:02d}-{MODEL_FILE_SUFFIX[1:]}'": _CALLER,
    },
    "checkpoint/write/commit.py": {
        "f'.{name}.{what}'": "the name of the tag's folder", "path": _CHECKED, "tag": _LISTED, "name": _LISTED,
    },
    "checkpoint/save/frozen_files.py": {"name": _OURS},
    "checkpoint/save/memory.py": {
        "self.key": "a hash", "name": "files_of has made it",
        "f'.rank_{ranks.rank}.lock'": _NUMBERED, "old": _LISTED,
    },
    "checkpoint/write/owner.py": {"path": "of a listing, or the constant name of the manifest", "name": _LISTED},
    "checkpoint/write/pointer.py": {
        "f'.{name}.{_host()}-{os.getpid()}-{secrets.token_hex(8)}.writing'": _OURS, "match[0]": _LISTED,
    },
    "checkpoint/write/ranks.py": {"name": _NUMBERED},
    "checkpoint/save/save.py": {"tag": "check_tag has checked it", "self.name": "files_of has made it"},
    "data/analysis_parts.py": {
        "metric": _CALLER, "f'{metric}_{what}'": _CALLER, "f'worker{worker}_thread{thread}'": _NUMBERED,
    },
    "data/clusters.py": {"f'clusters_{_key(metrics, samples, levels)[:16]}'": "digits of a hash"},
    "diagnosis/bundle.py": {"name": _LISTED},
    "diagnosis/ranks.py": {"f'{rank}.json'": _NUMBERED},
    "engine/parts/checkpoints.py": {"tag": _CALLER, "str(tag)": _CALLER},
    "engine/parts/postmortem.py": {
        "f'{self._run}-step{step:08d}'": _OURS, "f'rank{rank:05d}.pt'": _NUMBERED,
    },
    "formats/swapped_tensors.py": {
        "match[0].replace('optim', 'model')": "the name of the file that is open, with another word in it",
        "f\"rank{rank * int(model.get('mp_world_size') or 1) + mp_rank}\"": _NUMBERED,
    },
    "formats/weight_files.py": {"name": _OURS, "names[-1]": _OURS},
    "host/kept_memory.py": {"name": "this rank has written these files"},
    "host/libraries.py": {"name": "constants of callers"},
    "host/numa.py": {"f'node{node}'": _NUMBERED, "name": "constants of callers"},
    "host/programs.py": {"name": _CALLER},
    "host/recorded_names.py": {
        "name": "this is path_below", "part": "as above", "pointer": "latest or latest_universal",
    },
    "host/source_tree.py": {
        "_read(folder, 'commondir') or '.'": "git's own files of the source tree, of which the head's hash is read",
        "_read(folder).partition('gitdir: ')[2]": "as above: work trees name absolute paths",
    },
    "inference/engine.py": {"found": _CALLER},
    "launcher/memory_keeper.py": {"part": _CHECKED},
    "launcher/output.py": {"f\"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log\"": _NUMBERED},
    "engine/parts/outputs.py": {"kind": "the two names", "section.job_name": "the configuration says it, as it says output_path"},
    "monitor/csv_monitor.py": {
        "name.replace('/', '_').replace(' ', '_') + '.csv'": "the program names its events, and '/' is taken out",
        "name": "a name of the folder itself, which listdir gives",
    },
    "monitor/event_file.py": {"name": _OURS},
    "monitor/monitor.py": {"config.job_name": "the configuration says it, as it says output_path"},
    "nvme/perf_run_sweep.py": {"f'{operation}_{number}_{i:04}.json'": _NUMBERED},
    "nvme/transfer_rate.py": {"f'.ds_io_{os.getpid()}_{time.monotonic_ns()}.tensor'": _OURS},
    "ops/op_builder/builder.py": {"code_path": "a builder's own sources"},
    "ops/op_builder/jit.py": {
        "tag": _OURS, "plan.name": "a builder's own name", "_key(plan, flags)": "a hash",
        "_digest(toolchain.compiler_identity(compiler))": "a hash", "f'build-{os.getpid()}'": _OURS, "module": _OURS,
        "relative": "a hash and the module's name",
        "re.sub('\\\\\\\\(.)', '\\\\1', word)": "headers that this compiler has read, which are hashed",
    },
    "ops/op_builder/prebuilt_op.py": {"name": "constants of builders"},
    "ops/op_builder/toolchain.py": {"f'lib{name}.so'": "constants"},
    "pipe/layer_files.py": {
        "str(tag)": _CALLER, "f'module{coordinates}'": _NUMBERED,
        "f'layer_{layer:02d}' + (f'-{slices}' if slices else '') + '-model_states.pt'": _NUMBERED,
        "f'layer_{layer:02d}-*model_states.pt'": _NUMBERED,
    },
    "profiling/peak.py": {
        "kind": "two words of this package", r"re.sub('\\W+', '-', name)": "models of devices, without separators",
    },
    "utils/zero_files.py": {
        "f\"{('zero_pp_rank_0_' if zero_stage == 3 else '')}mp_rank_00_model_states.pt\"": _NUMBERED,
        "str(tag)": "the caller's, or checked by path_below", "glob_pattern": _CALLER,
    },
    "utils/zero_to_fp32.py": {"f'layer_{layer:02d}{end}'": _NUMBERED},
    "zero/optimizers/sliced_optimizer.py": {"f'{key}.pt'": _CALLER},
}  # fmt: skip
JOINED_NAMES_CPP = {
    "comm/process_mesh.cpp": "keys of the job's store, no paths",
    "comm/boards/store_board.cpp": "as above",
    "formats/zip_directory.cpp": "names in an archive, which are compared and never opened",
    "io/folders/own_folder.cpp": "constant names, and names of callers",
    "io/folders/paths.cpp": "this is path_below",
    "io/folders/run_folder.cpp": "names of a listing, and constant names of folders",
    "io/folders/swap_files.cpp": "names of a listing, and names from which '/' is taken out",
    "storage/block_files.cpp": "names that this run makes",
    "zero/offload/param_files.cpp": "numbers of parameters",
}
