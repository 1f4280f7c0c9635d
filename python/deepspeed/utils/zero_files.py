"""The files of a ZeRO checkpoint, by their names."""

import glob
import os
import re

from deepspeed.host.recorded_names import read_tag


def atoi(text):
    """An int for digits, the text itself otherwise."""
    return int(text) if text.isdigit() else text


def natural_keys(text):
    """Sorts rank 10 behind rank 9: ``names.sort(key=natural_keys)``."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def get_checkpoint_files(checkpoint_dir, glob_pattern):
    """Paths, in natural order. FileNotFoundError if there are none."""
    files = sorted(glob.glob(os.path.join(glob.escape(str(checkpoint_dir)), glob_pattern)), key=natural_keys)
    if not files:
        raise FileNotFoundError(f"can't find {glob_pattern} files in directory '{checkpoint_dir}'")
    return files


def get_optim_files(checkpoint_dir):
    """Paths of the files with optimizer states, one for each rank."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir):
    """Paths of the model files."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir, zero_stage):
    """Path of the model file of rank 0. FileNotFoundError without it, ValueError for an unknown stage."""
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"Directory '{checkpoint_dir}' doesn't exist")
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage = {zero_stage!r}: it is 0, 1, 2 or 3")
    path = os.path.join(checkpoint_dir, f"{'zero_pp_rank_0_' if zero_stage == 3 else ''}mp_rank_00_model_states.pt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"can't find model states file at '{path}'")
    return path


def _tag_folder(checkpoint_dir, tag):
    if tag is None:
        pointer = os.path.join(checkpoint_dir, "latest")
        if not os.path.isfile(pointer):
            raise ValueError(f"Unable to find 'latest' file at {pointer}; pass a tag")
        tag = read_tag(checkpoint_dir, "latest")
    folder = os.path.join(checkpoint_dir, str(tag))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"Directory '{folder}' doesn't exist")
    return folder
