"""Memory (NUMA) nodes and how the cores of this machine are shared among the ranks of one node."""

import os
import re

from deepspeed.host.cpu import usable_cores, whole_cores
from deepspeed.host.programs import find_program
from deepspeed.host.texts import read_text

_NODES = "/sys/devices/system/node"


def parse_range(rng):
    """``"3"`` -> [3], ``"2-5"`` -> [2, 3, 4, 5]; ValueError for anything else."""
    match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", rng)
    if not match:
        raise ValueError(f"{rng!r} is not a core number or a range of core numbers such as 0-27.")
    start, end = int(match[1]), int(match[2] or match[1])
    if start > end:
        raise ValueError(f"the range of cores {rng!r} ends before it starts.")
    return list(range(start, end + 1))


def parse_range_list(range_str):
    """``"0-2,8"`` -> [0, 1, 2, 8]; the numbers must increase, so that no core is named twice (ValueError)."""
    numbers = []
    for part in range_str.split(","):
        more = parse_range(part)
        if numbers and more[0] <= numbers[-1]:
            raise ValueError(
                f"the list of cores {range_str!r} names {part.strip()!r} after core {numbers[-1]}: write it in "
                f"increasing order and name each core once."
            )
        numbers += more
    return numbers


def format_range_list(numbers):
    """The inverse of ``parse_range_list``: [0, 1, 2, 8] -> ``"0-2,8"``."""
    runs = []  # [first, last]
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _node_numbers():
    names = os.listdir(_NODES) if os.path.isdir(_NODES) else []
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name))


def numa_nodes():
    """``[(node number, [core numbers])]`` of the memory nodes that have cores; [] if the system does not say."""
    cores = ((number, _text(number, "cpulist")) for number in _node_numbers())
    return [(number, parse_range_list(text)) for number, text in cores if text]


def get_numa_cores():
    """One list of core numbers for each memory node with cores, e.g. [[0, 1, 2, 3], [4, 5, 6, 7]]; [] if unknown."""
    return [cores for _, cores in numa_nodes()]


def numa_node_count():
    """The number of memory nodes with a core that this process may use; at least 1."""
    usable = set(usable_cores())
    return max(1, sum(1 for cores in get_numa_cores() if usable.intersection(cores)))


def cores_of_rank(bind_core_list, num_local_procs, local_rank):
    """Core numbers for one of ``num_local_procs`` ranks: equal shares of the list, in order; a remainder stays idle.

    ``bind_core_list`` is a text such as ``"0-27,32-59"``; None takes the cores this process may use, and shares the
    memory nodes evenly first, so that no rank straddles two nodes where that can be avoided; a physical core goes to
    one rank with all of its threads, while there are enough of them.
    """
    if bind_core_list:
        cores = parse_range_list(bind_core_list)
        missing = sorted(set(cores) - set(usable_cores()))
        if missing:
            raise ValueError(
                f"--bind_core_list {bind_core_list} names cores that this process may not use: "
                f"{format_range_list(missing)}. Usable are {format_range_list(usable_cores())}."
            )
        return _share(cores, num_local_procs, local_rank)
    usable = set(usable_cores())
    nodes = [kept for kept in ([core for core in node if core in usable] for node in get_numa_cores()) if kept]
    if len(nodes) > 1 and num_local_procs % len(nodes) == 0:
        per_node = num_local_procs // len(nodes)
        return _share_whole(nodes[local_rank // per_node], per_node, local_rank % per_node)
    return _share_whole(sorted(usable), num_local_procs, local_rank)


def _share_whole(cores, parts, index):
    whole = whole_cores(cores)
    if len(whole) < parts:
        return _share(cores, parts, index)
    return sorted(core for threads in _share(whole, parts, index) for core in threads)


def _share(cores, parts, index):
    size = len(cores) // parts
    if size == 0:
        raise ValueError(
            f"{parts} ranks cannot be bound to {len(cores)} core(s), each needs one of its own: start fewer ranks, "
            f"name more cores with --bind_core_list, or leave out --bind_cores_to_rank."
        )
    return cores[index * size : (index + 1) * size]


def check_for_numactl_pkg():
    """True when the program ``numactl`` is installed."""
    return find_program("numactl") is not None


def get_numactl_cmd(bind_core_list, num_local_procs, local_rank):
    """``(command prefix, cores)``: numactl arguments that bind one rank to its cores and their memory nodes.

    Memory comes from the nodes those cores belong to. ValueError when KMP_AFFINITY, which would bind once more, is set.
    """
    if "KMP_AFFINITY" in os.environ:
        raise ValueError(
            "KMP_AFFINITY is set and conflicts with the binding of cores by numactl: unset it, or leave out "
            "--bind_cores_to_rank."
        )
    cores = cores_of_rank(bind_core_list, num_local_procs, local_rank)
    command = ["numactl", "-C", format_range_list(cores)]
    nodes, wish = memory_of_ranks([cores])[0]
    if nodes:
        command += ["-p", str(nodes[0])] if wish else ["-m", format_range_list(nodes)]
    return command, cores


def memory_nodes_of(cores):
    """Numbers of the memory nodes that hold the given cores; [] on a machine with one node or none known."""
    nodes = numa_nodes()
    return [number for number, node in nodes if set(node).intersection(cores)] if len(nodes) > 1 else []


def fast_memory_near(node):
    """The number of a memory node without cores that is nearest to ``node`` and faster than it (HBM beside DRAM, in the
    mode that Intel calls flat), or None."""
    with_cores, every, own = {number for number, _ in numa_nodes()}, _node_numbers(), _bandwidth(node)
    distances = [int(text) for text in _text(node, "distance").split()]
    near = (
        (distances[every.index(number)] if len(distances) == len(every) else 255, number)
        for number in every
        if number not in with_cores and _bandwidth(number) > own > 0
    )
    return min(near, default=(None, None))[1]


def _text(node, name):
    return read_text(os.path.join(_NODES, f"node{node}", name))


def _bandwidth(node):
    # Firmware says it (HMAT); 0 where it does not.
    text = _text(node, "access0/initiators/read_bandwidth")
    return int(text) if text.isdigit() else 0


def memory_of_ranks(cores):
    """For each rank, whose cores are in the list ``cores``, the memory nodes it should take memory from and whether
    that is a wish only (fast memory may be full); ``([], False)`` where there is nothing to choose."""
    found = []
    for mine in cores:
        nodes = memory_nodes_of(mine) if mine else []
        fast = [near for near in (fast_memory_near(node) for node in nodes) if near is not None]
        found.append((fast, True) if fast else (nodes, False))
    return found
