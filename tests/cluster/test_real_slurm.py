"""Real Slurm does what docs/tutorials/slurm.md says: batch scripts, srun without a launcher, announced ends."""

import os
import pathlib
import re
import shutil
import sys

import pytest

from cluster_jobs import HERE, INIT, ends_clean, places, variables, write_program
from processes import wait_for

PAGE = os.path.join(HERE, "..", "..", "docs", "tutorials", "slurm.md")
SAVES = """
import os, signal, time
rank, heard = os.environ["RANK"], []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
open("here" + rank, "w").close()
while not heard: time.sleep(0.02)
while not os.path.exists("go"): time.sleep(0.02)
open("saved" + rank, "w").close()
"""


def blocks():
    """Commands of the page, for two nodes with one process each and no GPU; the script is what a test wrote."""
    text = pathlib.Path(PAGE).read_text()
    lines = re.findall(r"```bash\n(.*?)```", text, re.S)
    found = [*lines, re.search(r"`(srun\s+--ntasks-per-node=8 python train.py)`", text)[1].replace("\n", " ")]
    for old, new in (("slots=8", "slots=1"), ("per-node=8", "per-node=1"), ("#SBATCH --gpus-per-node=1\n", "")):
        found = [text.replace(old, new) for text in found]
    return found


@pytest.fixture
def batch(cluster, slurm, folder, monkeypatch):
    """Starts a text as a batch script on two nodes, on which ``deepspeed`` and ``python`` are programs."""
    programs = folder / "bin"
    programs.mkdir()
    write_program(programs / "deepspeed", f'exec {sys.executable} -m deepspeed.launcher "$@"')
    write_program(programs / "python", f'exec {sys.executable} "$@"')
    env = variables(SLURM_CONF=slurm.conf, PATH=f"{programs}:{os.environ['PATH']}")
    (folder / "ds_config.json").write_text("{}")

    def started(text, *options):
        lines = text.splitlines()
        lines = lines[1:] if lines[0] == "#!/bin/bash" else lines
        (folder / "job.sh").write_text("\n".join(["#!/bin/bash", "#SBATCH --nodes=2", *options, *lines, ""]))
        return slurm.said("sbatch", "--parsable", "-o", "out", "-e", "errors", "job.sh", **env).strip()

    return started


@pytest.fixture
def ended(slurm, folder):
    """``(exit code, stdout, stderr)`` of a job, when it has ended."""

    def waited(job):
        wait_for(lambda: job not in slurm.said("squeue", "-h", "-o", "%A").split(), 90)
        code = re.search(r"ExitCode=(\d+):(\d+)", slurm.said("scontrol", "show", "job", job))
        exit_code = int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
        return exit_code, (folder / "out").read_text(), (folder / "errors").read_text()

    return waited


@pytest.mark.parametrize("number", range(3))
def test_each_command_of_the_page(batch, ended, cluster, folder, number):
    (folder / "train.py").write_text(INIT)
    text = blocks()[number]
    assert "train.py" in text
    asked = ["#SBATCH --ntasks-per-node=2"] if number < 2 else []  # of the job; agents are one for each node
    code, out, errors = ended(batch(text, *asked))
    assert code == 0, errors
    found = places(out)
    assert [place[:4] for place in found] == [["h1", "0", "0", "2"], ["h2", "1", "0", "2"]], out + errors
    ends_clean(cluster)


@pytest.mark.parametrize("number", range(2))
def test_sigterm_to_all_processes_of_a_job_leaves_time_to_save(batch, ended, cluster, folder, slurm, number):
    """scancel, `--signal` and the time limit reach every process of a step at once, agents and supervisors, too."""
    (folder / "train.py").write_text(SAVES)
    job = batch(blocks()[number])
    wait_for(lambda: all((folder / f"here{rank}").exists() for rank in range(2)), 60)
    slurm.said("scancel", "--signal=TERM", job)
    wait_for(lambda: "CANCELLED" in (folder / "errors").read_text(), 30)
    (folder / "go").write_text("")
    code, _, errors = ended(job)
    assert sorted(path.name for path in folder.glob("saved*")) == ["saved0", "saved1"], errors
    assert code == 143, errors
    ends_clean(cluster)


def test_the_end_of_a_batch_job_is_the_end_of_its_ranks(batch, ended, cluster, folder, slurm):
    (folder / "train.py").write_text(SAVES)
    job = batch(blocks()[0])
    wait_for(lambda: all((folder / f"here{rank}").exists() for rank in range(2)), 60)
    slurm.said("scancel", job)
    assert ended(job)[0] != 0
    ends_clean(cluster, 30)


@pytest.mark.skipif(shutil.which("mpirun.mpich") is None, reason="mpich not installed: tools/packages.sh cluster")
def test_ranks_of_mpirun_are_not_taken_for_those_of_srun(batch, ended, cluster, folder):
    """Hydra starts a proxy on each node by srun; Slurm's variables, which ranks inherit, are those of the proxy."""
    (folder / "train.py").write_text(INIT)
    line = "mpirun.mpich -n 3 -ppn 2 python train.py"
    code, out, errors = ended(batch(line, "#SBATCH --ntasks-per-node=2"))
    assert code == 0, errors
    assert places(out) == [["h1", "0", "0", "3", "h1"], ["h1", "1", "1", "3", "h1"], ["h2", "2", "0", "3", "h1"]]
    ends_clean(cluster)
