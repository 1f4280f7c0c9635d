"""Runs of the programs in `examples` without a new interpreter, and the differences between a program and its port.

A ported program has a folder with `plain.py` and `ds.py`. Each has `main(argv)`, which returns the trained model (or a
dictionary of models) and the losses of its steps.
"""

import contextlib
import difflib
import importlib.util
import io
import json
import os
import pathlib
import re
import subprocess
import sys

import torch

import runs
from deepspeed.host.ports import free_port
from harness import run_ranks
from places import PYTHON, ROOT

EXAMPLES = os.path.join(ROOT, "examples")
FRAGMENT = re.compile(r"`([^`]+)`")
ALONE = dict.fromkeys(["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE",
                       "MASTER_ADDR", "MASTER_PORT"])  # fmt: skip


@contextlib.contextmanager
def loaded(folder, name):
    """The module `examples/<folder>/<name>.py`. As in a new interpreter its folder is the first of the path, and the
    modules of the examples that it imports are executed again."""
    path = os.path.join(EXAMPLES, folder)
    sys.path.insert(0, path)
    try:
        spec = importlib.util.spec_from_file_location(f"{folder}_{name}", os.path.join(path, f"{name}.py"))
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(path)
        for key, value in list(sys.modules.items()):
            if (getattr(value, "__file__", None) or "").startswith(EXAMPLES + os.sep):
                del sys.modules[key]


def run_program(folder, name, argv=()):
    """Returns what ``main(argv)`` of the program returns, and the text that it prints."""
    text = io.StringIO()
    with loaded(folder, name) as module, contextlib.redirect_stdout(text):
        result = module.main([str(argument) for argument in argv])
    return result, text.getvalue()


def body(rank, world_size, folder, name, argv):
    """The weights of the models of a program on this rank, the losses and the printed text."""
    (models, losses), text = run_program(folder, name, argv)
    models = models if isinstance(models, dict) else {"": models}
    weights = {f"{key}{name}": value for key, model in models.items() for name, value in runs.weights(model).items()}
    return weights, losses, text


def run_on(world_size, folder, name, *argv, **options):
    """A list with ``(weights, losses, text)`` of each rank."""
    return run_ranks(world_size, body, folder, name, argv, **options)


def run_plain(folder, *argv):
    """``(weights, losses, text)`` of plain.py in a process that does not belong to a job."""
    return run_on(1, folder, "plain", *argv, env=ALONE)[0]


def check_resumed(folder, at, argv, given, out, plain=()):
    """A run that is resumed after ``at`` steps has the weights and losses of an uninterrupted one, in bits: ds.py on two
    ranks, and plain.py.

    argv: flags of both programs. given, plain: those of one of them. out: the folder of results. Returns ``(text of the
    whole run, text of the resumed one)`` of each rank of ds.py.
    """
    save = ["--save_steps", at]
    load = ["--load_training_checkpoint", out / "saved_models", "--load_checkpoint_id", f"step{at}"]
    texts = []
    whole = run_on(2, folder, "ds", *argv, *given, *save)
    for (weights, losses, text), (more, last, again) in zip(whole, run_on(2, folder, "ds", *argv, *given, *load)):
        assert farthest(weights, more) == 0 and losses[at:] == last
        texts.append((text, again))
    alone = run_plain(folder, *argv, *plain, *save)
    more = run_plain(folder, *argv, *plain, *load)
    assert farthest(alone[0], more[0]) == 0 and alone[1][at:] == more[1]
    return texts


def check_both_kinds_of_layers(folder, argv, preln):
    """ds.py has the losses and the names of parameters with and without ``--deepspeed_transformer_kernel``."""
    runs_of_both = (run_on(1, folder, "ds", *argv, *more)[0] for more in ([], ["--deepspeed_transformer_kernel"]))
    (weights, losses, _), (others, of_kernel, _) = runs_of_both
    assert weights.keys() == others.keys() and any("Final" in name for name in weights) == bool(preln)
    assert (torch.tensor(losses) - torch.tensor(of_kernel)).abs().max() < 1e-4


def config_file(folder, tmp_path, **changes):
    """The path of a copy of the folder's ds_config.json with other values; None removes a key."""
    settings = json.loads(pathlib.Path(EXAMPLES, folder, "ds_config.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in {**settings, **changes}.items() if value is not None}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def launch(folder, *options, ranks=2, timeout=300):
    """The standard output of ds.py after the command of the README, started in the folder of the program."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    command += ["--master_port", str(free_port()), "ds.py", *map(str, options)]
    env = {**os.environ, "PYTHONPATH": PYTHON, "OMP_NUM_THREADS": "1"}
    cwd = os.path.join(EXAMPLES, folder)
    out = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-3000:]
    return out.stdout


def changed_lines(folder):
    """Lines that `diff plain.py ds.py` marks, without its marks."""
    plain, ported = (pathlib.Path(EXAMPLES, folder, name).read_text().splitlines() for name in ("plain.py", "ds.py"))
    found = list(difflib.unified_diff(plain, ported, n=0, lineterm=""))[2:]
    return [line[1:].strip() for line in found if line[0] in "+-"]


def explained(folder):
    """Fragments of code in the README's table of edits, which is below the heading "Edits"."""
    text = pathlib.Path(EXAMPLES, folder, "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.split("## Edits", 1)[1].split("\n## ")[0].splitlines() if line.startswith("|")]
    return [fragment for row in rows[2:] for fragment in FRAGMENT.findall(row.rsplit("|", 2)[1])]


def check_edits(folder, limit=40):
    """There are at most ``limit`` changed lines; each has a fragment of code of the README's table, except lines that
    only have brackets, and each fragment is in a changed line."""
    lines, fragments = changed_lines(folder), explained(folder)
    assert len(lines) <= limit, f"{len(lines)} changed lines"
    unexplained = [line for line in lines if line.strip("()[]{}, ") and not any(part in line for part in fragments)]
    assert not unexplained, unexplained
    unused = [fragment for fragment in fragments if not any(fragment in line for line in lines)]
    assert not unused, unused


def farthest(weights, wanted):
    """The largest difference of an element of two dictionaries of weights."""
    assert weights.keys() == wanted.keys()
    return max((weights[name] - wanted[name]).abs().max().item() for name in wanted)
