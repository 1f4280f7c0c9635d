"""The record of operations: formulas, filters, tables; without a process group."""

import json

import pytest
import torch

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed.comm import comms_log
from deepspeed.comm.bandwidth import bandwidths, readable_size
from deepspeed.comm.comms_logger import trimmed_mean
from deepspeed.comm.config import DeepSpeedCommsConfig
from deepspeed.config import DeepSpeedConfig
from deepspeed.utils.comms_logging import CommsLogger, get_caller_func
from refusals import refused


@pytest.fixture(autouse=True)
def quiet():
    yield
    dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
    dist.reset_log()


@pytest.mark.parametrize(
    "name, algorithm, bus",
    [
        # 1 MB in 1 ms over 4 ranks: 8 Gbit/s of the tensor.
        ("all_reduce", 16.0, 12.0),
        ("all_gather_into_tensor", 32.0, 24.0),
        ("all_gather", 32.0, 24.0),
        ("reduce_scatter_tensor", 8.0, 6.0),
        ("all_to_all_single", 8.0, 6.0),
        ("gather", 32.0, 24.0),
        ("scatter", 32.0, 24.0),
        ("broadcast", 8.0, 8.0),
        ("send", 8.0, 8.0),
    ],
)
def test_bandwidths(name, algorithm, bus):
    assert bandwidths(name, 1_000_000, 1.0, 4) == pytest.approx((algorithm, bus))
    assert bandwidths(name, 0, 1.0, 4) == bandwidths(name, 10, 0.0, 4) == (0.0, 0.0)


def test_the_published_figures_of_an_all_reduce():
    # 678.86 MB over 16 ranks in 9.46 ms: 1204 and 1129 Gbit/s.
    assert bandwidths("all_reduce", 678.86 * 2**20, 9.46, 16) == pytest.approx((1204, 1129), rel=1e-3)


def test_sizes_and_means():
    assert [readable_size(n) for n in (0, 1023, 1536, 678.86 * 2**20)] == ["0 B", "1023 B", "1.5 KB", "678.86 MB"]
    assert trimmed_mean([1.0] * 9 + [100.0]) == 1.0 and trimmed_mean([3.0]) == 3.0 and trimmed_mean([]) == 0.0


def filled():
    log = CommsLogger()
    for ms in (1.0, 2.0, 3.0):
        log.add("all_reduce", "all_reduce", ms, 1000, 2)
    log.append("broadcast", "broadcast", 4.0, 2048)
    return log


def test_what_a_logger_tells():
    log = filled()
    assert log.has_data() and log.get_total_operations() == 4
    assert log.get_operation_names() == ["all_reduce", "broadcast"]
    row = log.get_operation_summary("all_reduce")[1000]
    assert (row["count"], row["total_latency_ms"], row["avg_latency_ms"]) == (3, 6.0, 2.0)
    assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] / 2)
    assert (row["msg_size_bytes"], row["msg_size_str"]) == (1000, "1000 B")
    assert log.get_operation_summary("gather") == {}
    log.get_raw_data()["all_reduce"][1000][0] = 99
    assert log.comms_dict["all_reduce"][1000][0] == 3
    log.reset_data()
    assert not log.has_data() and log.get_total_operations() == 0


def test_the_table(capsys):
    assert filled().log_all() is None
    lines = capsys.readouterr().out.splitlines()
    header = next(line for line in lines if line.startswith("Comm. Op"))
    columns = ["Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)"]
    assert [header.index(name) for name in columns] == [20 * i for i in range(1, 7)]
    assert lines[lines.index("all_reduce") + 1].split() == ["1000", "B", "3", "6.00", "2.00", "0.01", "0.00"]


def test_the_dict():
    found = filled().log_all(print_log=False, return_dict=True, show_straggler=True)
    assert set(found) == {"summary", "metadata", "straggler_analysis"}
    assert found["summary"]["broadcast"][2048]["count"] == 1
    assert (found["metadata"]["world_size"], found["metadata"]["rank"]) == (1, 0)
    assert found["straggler_analysis"]["all_reduce"][1000]["total_straggler_ms"] == 0.0


def test_filters():
    log = CommsLogger()
    assert not log.wants("all_reduce")
    log.enabled = True
    assert log.wants("all_reduce")
    log.stop_profiling_comms()
    assert not log.wants("all_reduce") and log.wants("all_reduce", asked=True)
    log.start_profiling_op(["all_reduce", "send"])
    assert log.wants("all_reduce") and not log.wants("recv")
    log.stop_profiling_op(["all_reduce"])
    assert not log.wants("all_reduce") and log.wants("send")
    log.start_profiling_comms()
    assert log.wants("recv")


def test_where_the_configuration_comes_from(tmp_path):
    section = {"enabled": True, "verbose": False, "prof_all": False, "prof_ops": ["send"], "debug": True}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"comms_logger": section}))
    log = comms_log.comms_logger
    for source in (
        {"comms_logger": section},
        str(path),
        DeepSpeedConfig({"train_batch_size": 1, "comms_logger": section}),
    ):
        dist.configure(enabled=False, prof_all=True, prof_ops=[], debug=False)
        dist.configure(source)
        assert (log.enabled, log.prof_all, log.prof_ops, log.debug) == (True, False, ["send"], True)
    # No section: what was said before stays.
    dist.configure({"train_batch_size": 1})
    dist.configure(DeepSpeedConfig({"train_batch_size": 1}))
    assert log.enabled
    dist.configure(source, enabled=False, verbose=True)
    assert not log.enabled and log.verbose
    made = DeepSpeedCommsConfig({"comms_logger": section})
    CommsLogger().configure(made)
    assert made.comms_logger_enabled and not DeepSpeedCommsConfig({}).comms_logger_enabled


def test_what_the_arguments_tell():
    def operation(tensor_list, tensor, group=None, prof=False, log_name="operation", debug="x"):
        pass

    assert dist.get_default_args(operation) == {"group": None, "prof": False, "log_name": "operation", "debug": "x"}
    assert dist.get_tensor_position(operation) == 1 and dist.get_tensor_position(lambda a: a) == -1
    t = torch.zeros(3)
    assert dist.get_tensor_kwarg(operation, {"tensor": t}) is t
    assert dist.get_msg_size_from_args(operation, [t, t], t) == 12
    assert dist.get_msg_size_from_args(operation, [t, t], tensor=t.half()) == 6
    assert dist.get_msg_size_from_args(dist.all_to_all, [t], [t, t]) == 24
    assert dist.get_msg_size_from_args(dist.barrier) == 0
    assert dist.get_debug_log_name({"log_name": "a", "debug": "f"}, True) == "a | [Caller Func: f]"
    assert dist.get_debug_log_name({"log_name": "a", "debug": "f"}, False) == "a"


def test_the_caller():
    def inner():
        return get_caller_func(frame=2)

    def outer():
        return inner()

    assert outer() == "outer" and get_caller_func(frame=10**6) == "unknown"


def test_torchs_functions_are_not_replaced(monkeypatch):
    before = dict(vars(torch.distributed))
    for raw in ("1", "0"):
        monkeypatch.setenv("DS_COMMS_LOGGER_RAW", raw)
        dist.configure(enabled=True)
        dist.configure(enabled=True)  # again
        assert all(getattr(torch.distributed, name) is value for name, value in before.items())
        dist.configure(enabled=False)


def test_one_observer_of_torch_at_a_time():
    def numbered(group):
        return "", -1

    dist.configure(enabled=True)
    refused(RuntimeError, "go to another log already", _native._C.TorchCalls, _native._C.CallLog(), numbered)
    dist.configure(enabled=False)
    _native._C.TorchCalls(_native._C.CallLog(), numbered)
