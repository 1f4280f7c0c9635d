"""The same jobs by each launcher on hosts with an sshd of their own: real ssh, pdsh, Slurm, Open MPI and MPICH; a
stand-in for the mpirun of Intel MPI and of MVAPICH2."""

import os
import random
import signal

import pytest

from cluster_jobs import LAUNCHERS, MPI, SLEEP, TRAIN, all_here, ended, ends_clean, start, write_hosts

GETS = """
import os, sys
open("got" + os.environ["RANK"], "wb").write(
    b"\\0".join([*map(os.fsencode, sys.argv[2:]), *[os.environb[b"DS_TEST_%d" % i] for i in range(1000)]]))
"""
MEMORY = """
import os
names = ("TENSORS_KEEP_ALLOCATED", "ENABLE_EXPERIMENTAL_FLAGS", "PT_HPU_POOL_MEM_ACQUIRE_PERC")
found = [os.environ.get(name, "missing") for name in names]
os.write(1, ("memory %s %s\\n" % (os.uname().nodename, " ".join(found))).encode())
"""
by_each = pytest.mark.parametrize("launcher", LAUNCHERS, indirect=True)


@by_each
def test_ranks_of_two_hosts_train(cluster, launcher, folder):
    world = write_hosts(folder, launcher)
    code, out, errors = ended(start(cluster, launcher, TRAIN))
    assert code == 0, errors
    hosts = ["h1", "h1", "h2", "h2"][:world]
    lines = sorted(line[line.index("sum ") :].split() for line in out.splitlines() if "sum " in line)
    places = [[host, str(rank), str(rank % 2), str(world), str(hosts.count(host))] for rank, host in enumerate(hosts)]
    assert sorted(line[3:] for line in lines) == places, out + errors
    assert len({line[1] for line in lines}) == 1
    if launcher not in MPI:
        prefixes = sorted(line.split("]")[0] for line in out.splitlines() if "] sum " in line)
        assert prefixes == [f"[{host}:{rank}" for rank, host in enumerate(hosts)]
    ends_clean(cluster)


@by_each
def test_values_and_arguments_arrive_byte_for_byte(cluster, launcher, folder):
    world, numbers = write_hosts(folder, launcher), random.Random(7)
    words = [bytes(numbers.choice(range(1, 256)) for _ in range(numbers.randint(1, 40))) for _ in range(1000)]
    more = {f"DS_TEST_{i}": os.fsdecode(word) for i, word in enumerate(words)}
    told = words[: 900 if launcher == "mpich" else None]  # Hydra crashes when a command has 1,000 words
    code, _, errors = ended(start(cluster, launcher, GETS, given=map(os.fsdecode, told), **more))
    assert code == 0, errors
    for rank in range(world):
        assert (folder / f"got{rank}").read_bytes().split(b"\0") == told + words


@by_each
@pytest.mark.parametrize("chosen", ["", "hpu"])
def test_memory_flags_of_gaudi_reach_the_second_host(cluster, launcher, chosen, folder):
    """Ranks that choose a device by their packages get them, too."""
    world = write_hosts(folder, launcher)
    flags = {"TENSORS_KEEP_ALLOCATED": "0", "ENABLE_EXPERIMENTAL_FLAGS": "true", "PT_HPU_POOL_MEM_ACQUIRE_PERC": "100"}
    code, out, errors = ended(start(cluster, launcher, MEMORY, DS_ACCELERATOR=chosen, **flags))
    assert code == 0, errors
    found = sorted(line[line.index("memory ") :] for line in out.splitlines() if "memory " in line)
    assert found == [f"memory {host} 0 true 100" for host in ["h1", "h1", "h2", "h2"][:world]], out + errors
    ends_clean(cluster)


@by_each
def test_a_failing_rank_on_the_second_host(cluster, launcher, folder):
    world = write_hosts(folder, launcher)
    code, _, errors = ended(start(cluster, launcher, SLEEP, DS_FAIL="2"))
    assert code == 37 and f"rank 2 of {world} (pid " in errors and "host h2) failed" in errors, errors
    assert "last words" in errors and "rank 0 of" not in errors  # mpirun is no rank, and who is ended has not failed
    ends_clean(cluster, 5)


@by_each
def test_ctrl_c(cluster, launcher, folder):
    world = write_hosts(folder, launcher)
    job = start(cluster, launcher, SLEEP)
    all_here(world)
    job.send_signal(signal.SIGINT)
    code, _, errors = ended(job)
    assert code == 130 and " failed " not in errors, errors
    ends_clean(cluster, 5)
