"""Cores, memory nodes, devices, ports and BLAS of a machine that is made up where needed."""

import os
import socket

import pytest

from deepspeed.host import blas, cpu, devices, numa, ports, product_error
from deepspeed.utils import numa as published
from processes import run_python, taken_port
from refusals import refused


# ---- core lists ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, numbers",
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0-1,8,10-11", [0, 1, 8, 10, 11]), (" 1 - 2 , 5", [1, 2, 5])],
)
def test_range_lists(text, numbers):
    assert published.parse_range_list(text) == numbers
    assert numa.parse_range_list(numa.format_range_list(numbers)) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "5-2", "1,1", "3,0-1", "0-4,2", "1,,2"])
def test_bad_range_lists(text):
    refused(ValueError, "", published.parse_range_list, text)


def test_format_is_short():
    assert numa.format_range_list([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8" and numa.format_range_list([]) == ""


@pytest.fixture
def two_sockets(monkeypatch):
    monkeypatch.setattr(numa, "usable_cores", lambda: list(range(64)))
    monkeypatch.setattr(cpu, "thread_siblings", str)
    monkeypatch.setattr(numa, "numa_nodes", lambda: [(0, list(range(32))), (2, list(range(32, 64)))])
    monkeypatch.delenv("KMP_AFFINITY", raising=False)


def test_worked_example(two_sockets):
    shares = [numa.format_range_list(numa.cores_of_rank("0-27,32-59", 4, rank)) for rank in range(4)]
    assert shares == ["0-13", "14-27", "32-45", "46-59"]


def test_ranks_stay_within_memory_nodes(two_sockets):
    assert numa.cores_of_rank(None, 2, 1) == list(range(32, 64))
    assert [numa.cores_of_rank(None, 4, rank)[0] for rank in range(4)] == [0, 16, 32, 48]
    shares = [numa.cores_of_rank(None, 3, rank) for rank in range(3)]
    assert [len(share) for share in shares] == [21, 21, 21] and len(set(sum(shares, []))) == 63
    assert numa.numa_node_count() == 2


def test_numactl_command(two_sockets, monkeypatch):
    assert published.get_numactl_cmd("0-27,32-59", 4, 2) == (["numactl", "-C", "32-45", "-m", "2"], list(range(32, 46)))
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    refused(ValueError, "KMP_AFFINITY", published.get_numactl_cmd, None, 4, 2)


def test_physical_cores_are_shared_whole(monkeypatch):
    monkeypatch.setattr(numa, "usable_cores", lambda: list(range(8)))
    monkeypatch.setattr(numa, "numa_nodes", lambda: [])
    monkeypatch.setattr(cpu, "thread_siblings", lambda core: f"{core % 4},{core % 4 + 4}")
    assert cpu.whole_cores(range(8)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cpu.physical_cores(range(8)) == [0, 1, 2, 3]
    assert [numa.cores_of_rank(None, 2, rank) for rank in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [numa.cores_of_rank(None, 3, rank) for rank in range(3)] == [[0, 4], [1, 5], [2, 6]]
    assert [numa.cores_of_rank(None, 8, rank) for rank in range(8)] == [[core] for core in range(8)]
    assert numa.cores_of_rank("0-3", 2, 1) == [2, 3]  # a list is taken as it is


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/a/b", "/sys/fs/cgroup/a/b/cpu.max": "max 100000",
          "/sys/fs/cgroup/a/cpu.max": "350000 100000"}, 3.5),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        ({"/proc/self/cgroup": "4:cpuacct,cpu:/x\n0::/", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
          "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"/proc/self/cgroup": "4:cpu:/x", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
          "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)  # fmt: skip
def test_the_time_that_a_container_may_use(files, cores, monkeypatch):
    monkeypatch.setattr(cpu, "read_text", lambda path: files.get(path.replace("//", "/"), ""))
    assert cpu.quota_cores() == cores


def test_fast_memory_beside_a_node(tmp_path, monkeypatch):
    # Two sockets with DRAM (0, 1), their HBM (2, 3), and a slow expander without cores (4).
    distances = ["10 21 13 23 17", "21 10 23 13 18", "13 23 10 23 20", "23 13 23 10 20", "17 18 20 20 10"]
    for node, (cores, speed) in enumerate([("0-3", 100), ("4-7", 100), ("", 400), ("", 400), ("", 30)]):
        folder = tmp_path / f"node{node}" / "access0" / "initiators"
        folder.mkdir(parents=True)
        (folder / "read_bandwidth").write_text(f"{speed}\n")
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
        (tmp_path / f"node{node}" / "distance").write_text(distances[node] + "\n")
    monkeypatch.setattr(numa, "_NODES", str(tmp_path))
    monkeypatch.setattr(numa, "usable_cores", lambda: list(range(8)))
    monkeypatch.delenv("KMP_AFFINITY", raising=False)
    assert [numa.fast_memory_near(node) for node in (0, 1)] == [2, 3]
    assert numa.memory_of_ranks([[0, 1], [4, 5], None]) == [([2], True), ([3], True), ([], False)]
    assert published.get_numactl_cmd("0-7", 2, 1)[0] == ["numactl", "-C", "4-7", "-p", "3"]
    for node in (2, 3):
        (tmp_path / f"node{node}" / "access0" / "initiators" / "read_bandwidth").unlink()
    assert numa.memory_of_ranks([[0, 1], [3, 4]]) == [([0], False), ([0, 1], False)]


def test_memory_comes_from_a_node():
    code = """
from deepspeed.launcher import linux
done = linux.take_memory_from([0]) and linux.take_memory_from([0], wish=True) and linux.take_memory_from([0])
print(done, any("bind:0" in line for line in open("/proc/self/numa_maps")), linux.take_memory_from([]))
"""
    said = run_python(code)
    if said.stdout.startswith("False"):
        pytest.skip("set_mempolicy is not allowed here")
    assert said.stdout == "True True False\n", said.stderr


def test_too_few_cores(two_sockets):
    refused(ValueError, "3 ranks cannot be bound to 2 core", numa.cores_of_rank, "0-1", 3, 0)
    refused(ValueError, "64-70", numa.cores_of_rank, "60-70", 2, 0)


def test_this_machine():
    assert cpu.usable_cores() == sorted(os.sched_getaffinity(0))
    assert set(cpu.physical_cores(cpu.usable_cores())) <= set(cpu.usable_cores())
    total, available = cpu.memory_bytes()
    assert 0 < available <= total and 0 < cpu.resident_bytes() < total
    assert numa.numa_node_count() >= 1
    assert cpu.widest_isa() in ("avx512_bf16", "avx512", "avx2", "sve", "neon", "scalar")


def test_openblas_hint(monkeypatch):
    flags = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
    monkeypatch.setattr(cpu, "cpu_info", lambda: ("new", flags))
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert cpu.openblas_coretype() == "SkylakeX"
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert cpu.openblas_coretype() is None
    monkeypatch.delenv("OPENBLAS_CORETYPE")
    monkeypatch.setattr(cpu, "cpu_info", lambda: ("old", {"avx2"}))
    assert cpu.openblas_coretype() is None


# ---- devices, ports -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "variable, visible",
    [(None, ["0", "1", "2"]), ("2,0", ["2", "0"]), ("GPU-1,MIG-2", ["GPU-1", "MIG-2"]), ("", []), ("1,-1,2", ["1"])],
)
def test_visible_gpus(variable, visible, monkeypatch):
    monkeypatch.setattr(devices, "nvidia_device_count", lambda: 3)
    if variable is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert devices.visible_gpu_ids() == visible
    monkeypatch.setattr(devices, "nvidia_device_count", lambda: 0)
    assert devices.visible_gpu_ids() == []


@pytest.mark.parametrize(
    "family, address", [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")]
)
def test_ports(family, address):
    try:
        taken = socket.socket(family)
        taken.bind((address, 0))
    except OSError:
        pytest.skip(f"no {address} here")
    with taken:
        taken.listen(1)
        assert not ports.port_is_free(taken.getsockname()[1])
    assert ports.port_is_free(ports.free_port())


def test_a_port_is_claimed_by_one_launcher():
    port, claim = ports.claim_any_port(23456)
    with claim:
        assert ports.port_is_free(port) and ports.claim_port(port) is None
        other, second = ports.claim_any_port(port)
        with second:
            assert other > port
    ports.claim_port(port).close()
    with taken_port() as port:
        assert ports.claim_port(port) is None


# ---- BLAS ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "paths, name",
    [
        (["/usr/lib/x86_64-linux-gnu/blas/libblas.so.3.11.0"], "reference"),
        (["/usr/lib64/libblas.so.3.12.0"], "reference"),
        (["/usr/lib/x86_64-linux-gnu/openblas-openmp/libblas.so.3"], "OpenBLAS"),
        (["/usr/lib/libblas.so.3", "/usr/lib/libopenblasp-r0.3.21.so"], "OpenBLAS"),
        (["/opt/intel/libmkl_rt.so.2", "/usr/lib/libblas.so.3"], "MKL"),
        (["/usr/lib/x86_64-linux-gnu/blis-openmp/libblas.so.3"], "BLIS"),
        (["/usr/lib/x86_64-linux-gnu/atlas/libblas.so.3"], "ATLAS"),
        (["/venv/site-packages/numpy.libs/libscipy_openblas64_.so"], None),
        ([], None),
    ],
)
def test_blas_by_path(paths, name):
    assert blas.blas_name(paths)[0] == name


def test_blas_warning_names_the_fix(monkeypatch):
    import torch  # noqa: F401 (it is torch's BLAS that is asked for)

    monkeypatch.setattr(blas, "blas_in_use", lambda: ("reference", "/usr/lib/blas/libblas.so.3"))
    assert "apt install libopenblas0-openmp" in blas.blas_warning()
    monkeypatch.setattr(blas, "blas_in_use", lambda: ("OpenBLAS", "/x"))
    assert blas.blas_warning() is None


def test_blas_of_this_process():
    import torch

    name, path = blas.blas_in_use()
    assert name and (path is None or os.path.exists(path))
    assert (name == "MKL" and path is None) == torch.backends.mkl.is_available()


# ---- 16-bit products ------------------------------------------------------------------------------------------------
def test_the_error_of_bf16_products_is_measured_once():
    import torch

    torch.manual_seed(3)
    state = torch.get_rng_state()
    product_error.product_error.cache_clear()
    error = product_error.product_error(torch.bfloat16)
    assert product_error.product_error(torch.bfloat16) == error and product_error.product_error.cache_info().misses == 1
    assert 1e-4 < error < 0.2 and torch.equal(torch.get_rng_state(), state)
    # The same question, asked of a product that adds in fp32 on every processor.
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    exact = a.double() @ b.double()
    wide = (((a.float() @ b.float()).bfloat16().double() - exact).norm() / exact.norm()).item()
    assert wide <= product_error.largest_error(torch.bfloat16)
    assert product_error.adds_in_fp32(torch.bfloat16) == (error < 2 * wide)


@pytest.mark.parametrize(
    "error, exact", [(0.0017, True), (2.0**-8, True), (0.0069, False), (0.0267, False), (None, False)]
)
def test_bf16_warning_names_error_and_ways_out(error, exact, monkeypatch):
    import torch

    monkeypatch.setattr(product_error, "product_error", lambda dtype: error)
    assert product_error.adds_in_fp32(torch.bfloat16) == exact
    text = product_error.product_warning()
    if exact or error is None:
        assert text is None
    else:
        assert f"{error:.2%}" in text and "torch 2.x" in text and "fp32" in text and "0.39%" in text
    assert product_error.bf16_products() == ("none" if error is None else f"relative error {error:.2%}")
