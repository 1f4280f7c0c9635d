"""Collectives between the ranks of one host: the backend ``shm`` against gloo, in one run.

    python benchmarks/python/comm.py [--ranks 2,4] [--sizes 1K,64K,1M,16M,64M] [--json FILE] [--png FILE]
    python benchmarks/python/comm.py --fingerprints --sizes 1K,64K,1M [--ranks 2]
    python benchmarks/python/comm.py --carriers --sizes 1K,64K,1M,64M [--ranks 2]

Every collective is first checked, then timed in interleaved blocks with both backends, through torch.distributed (where
this torch's gloo lacks a collective or a dtype, through deepspeed.comm, which fills the gap). Sizes are the bytes of
the whole tensor: what all-reduce reduces, what reduce-scatter takes, what all-gather returns. Beside it stands the
limit: the same bytes copied once by one rank while the others do the same, from memory to memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
OPS = ("all_reduce", "all_gather", "reduce_scatter")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default="1K,16K,256K,4M,64M,256M")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--fingerprints", action="store_true", help="only what comparing and recording calls costs")
    parser.add_argument("--carriers", action="store_true", help="only the ways of deepspeed.comm.all_reduce")
    parser.add_argument("--seconds", type=float, default=0.5, help="aim of the time for each figure")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--png", metavar="FILE", help="draws the curves; default: beside the JSON file")
    parser.add_argument("--worker", metavar="OUT", help=argparse.SUPPRESS)
    return parser.parse_args()


def bytes_of(text):
    return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]


def work(args):
    import torch
    import torch.distributed as dist

    from deepspeed import comm

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if args.fingerprints or args.carriers:
        found = (fingerprints if args.fingerprints else carriers)(args, dist, torch, comm, world)
    else:
        found = compare(args, comm, dist, torch, rank, world)
    if rank == 0:
        with open(args.worker, "w", encoding="utf-8") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def fingerprints(args, dist, torch, comm, world):
    """all_reduce of the backend shm with and without."""
    groups = {"with": dist.new_group(backend="shm")}
    os.environ["DS_COMM_FINGERPRINTS"] = "0"
    groups["without"] = dist.new_group(backend="shm")
    return in_turns(
        args, dist, torch, world, {
            name: lambda value, group=group: dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
            for name, group in groups.items()
        },
    )  # fmt: skip


def carriers(args, dist, torch, comm, world):
    """all_reduce of deepspeed.comm over gloo, over gloo with every call compared before it starts, and in the memory
    beside gloo, against torch's own over gloo."""
    beside = comm.new_group(list(range(world)))

    def strict(value):
        os.environ["DS_COMM_FINGERPRINTS"] = "strict"
        comm.all_reduce(value, op=comm.ReduceOp.MAX)
        del os.environ["DS_COMM_FINGERPRINTS"]

    return in_turns(
        args, dist, torch, world, {
            "gloo": lambda value: dist.all_reduce(value, op=dist.ReduceOp.MAX),
            "comm_over_gloo": lambda value: comm.all_reduce(value, op=comm.ReduceOp.MAX),
            "comm_strict": strict,
            "comm_in_memory": lambda value: comm.all_reduce(value, op=comm.ReduceOp.MAX, group=beside),
        },
    )  # fmt: skip


def in_turns(args, dist, torch, world, contenders):
    """Blocks of calls that take turns; the order changes from block to block. Ratios are those of the first
    contender's time to each other's in the same round."""
    names, found = list(contenders), []
    for size in map(bytes_of, args.sizes.split(",")):
        value, times = torch.ones(size // 4), {name: [] for name in names}
        block = max(1, min(500, (8 << 20) // size))
        go_on, deadline, rounds = torch.ones(1), time.monotonic() + args.seconds, 0
        while go_on.item():
            for name in names if rounds % 2 else reversed(names):
                contenders[name](value)
                start = time.perf_counter()
                for _ in range(block):
                    contenders[name](value)
                times[name].append((time.perf_counter() - start) / block)
            rounds += 1
            go_on.fill_(float(rounds < 5 or time.monotonic() < deadline))
            dist.broadcast(go_on, 0)
        seconds = {name: statistics.median(values) for name, values in times.items()}
        row = {"op": "all_reduce", "bytes": size, "ranks": world, "rounds": rounds, "seconds": seconds}
        ratios = {
            name: statistics.median(a / b for a, b in zip(times[names[0]], times[name], strict=True))
            for name in names[1:]
        }
        found.append({**row, "least": {n: min(v) for n, v in times.items()}, f"{names[0]}_over": ratios})
    return found


def compare(args, comm, dist, torch, rank, world):
    groups = {"gloo": None, "shm": dist.new_group(backend="shm")}
    found = []
    for dtype_name in args.dtypes.split(","):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
        for size in map(bytes_of, args.sizes.split(",")):
            numel = size // dtype.itemsize if hasattr(dtype, "itemsize") else size // (4 if dtype_name == "fp32" else 2)
            row = numel // world
            whole, part = torch.ones(row * world, dtype=dtype), torch.ones(row, dtype=dtype)
            copy_to = torch.empty_like(whole)

            def call(op, group, whole=whole, part=part):
                if op == "all_reduce":
                    (dist if group is not None else comm).all_reduce(whole, group=group)
                elif op == "all_gather":
                    comm.all_gather_into_tensor(whole, part, group=group)
                else:
                    comm.reduce_scatter_tensor(part, whole, group=group)

            for op in OPS:
                for group in groups.values():
                    whole.fill_(1)
                    part.fill_(rank + 1)
                    call(op, group)
                    if op == "all_reduce":
                        assert whole.float().eq(world).all()
                    elif op == "all_gather":
                        expected = torch.arange(1, world + 1).repeat_interleave(row).to(dtype)
                        assert torch.equal(whole, expected)
                    else:
                        assert part.float().eq(world).all()
                whole.zero_()
                part.zero_()
                times = {name: [] for name in (*groups, "copy")}
                block = 20 if size <= 1 << 16 else 1
                deadline, rounds = time.monotonic() + args.seconds, 0
                go_on = torch.ones(1)
                while go_on.item():
                    for name in times:
                        dist.barrier()
                        start = time.perf_counter()
                        for _ in range(block):
                            if name == "copy":
                                copy_to.copy_(whole)
                            else:
                                call(op, groups[name])
                        times[name].append((time.perf_counter() - start) / block)
                    rounds += 1
                    go_on.fill_(float(rounds < 5 or time.monotonic() < deadline))
                    dist.broadcast(go_on, 0)
                seconds = {name: statistics.median(values) for name, values in times.items()}
                found.append({"op": op, "dtype": dtype_name, "bytes": size, "ranks": world, "seconds": seconds})
    return found


def measure(args, ranks, port):
    with tempfile.TemporaryDirectory() as scratch:
        out = os.path.join(scratch, "figures.json")
        command = [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--worker", out]
        for name in ("sizes", "dtypes", "seconds"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--fingerprints"] * args.fingerprints + ["--carriers"] * args.carriers
        processes = []
        for rank in range(ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1")
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
            processes.append(subprocess.Popen(command, env=env))
        if any([process.wait() for process in processes]):
            sys.exit("a rank failed; its message is above")
        with open(out, encoding="utf-8") as file:
            return json.load(file)


def show(rows):
    print(f"{'':30s} {'gloo':>12s} {'shm':>12s} {'ratio':>8s} {'copy':>12s} {'shm GB/s':>9s}")
    for row in rows:
        t = row["seconds"]
        name = f"{row['ranks']} ranks {row['dtype']} {row['op']:14s} {row['bytes'] >> 10:7d} K"
        print(
            f"{name:40s} {t['gloo'] * 1e6:10.1f} us {t['shm'] * 1e6:10.1f} us {t['gloo'] / t['shm']:7.1f}x "
            f"{t['copy'] * 1e6:10.1f} us {row['bytes'] / t['shm'] / 1e9:8.2f}"
        )


def draw(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = sorted({row["ranks"] for row in rows})
    figure, axes = pyplot.subplots(len(ranks), len(OPS), figsize=(5 * len(OPS), 4 * len(ranks)), squeeze=False)
    for line, count in enumerate(ranks):
        for column, op in enumerate(OPS):
            plot = axes[line][column]
            for dtype, style in (("fp32", "-"), ("bf16", "--")):
                mine = [r for r in rows if (r["ranks"], r["op"], r["dtype"]) == (count, op, dtype)]
                for name in ("gloo", "shm", "copy") if mine else ():
                    speed = [r["bytes"] / r["seconds"][name] / 1e9 for r in mine]
                    plot.plot([r["bytes"] for r in mine], speed, style, marker=".", label=f"{name} {dtype}")
            plot.set(xscale="log", yscale="log", title=f"{op}, {count} ranks", xlabel="bytes", ylabel="GB/s")
            plot.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    rows = []
    for index, ranks in enumerate(map(int, args.ranks.split(","))):
        rows += measure(args, ranks, 29900 + os.getpid() % 90 + index)
    if args.fingerprints or args.carriers:
        for row in rows:
            print(f"{row['ranks']} ranks {row['bytes'] >> 10:7d} K, {row['rounds']} rounds:")
            (over,) = (row[key] for key in row if key.endswith("_over"))
            for name, seconds in row["seconds"].items():
                ratio = f", {over[name]:.4f} times as fast" if name in over else ""
                print(f"  {name:16s} {seconds * 1e6:10.2f} us, least {row['least'][name] * 1e6:10.2f} us{ratio}")
        write_json(args, rows)
        return
    show(rows)
    picture = args.png or (os.path.splitext(args.json)[0] + ".png" if args.json else None)
    if picture:
        draw(rows, picture)
    write_json(args, rows)


def write_json(args, rows):
    if args.json:
        sys.path.insert(0, HERE)
        from common import machine

        machine.write_json(args.json, "comm", {"rows": rows})


if __name__ == "__main__":
    main()
