"""The exchange of tokens for heads between ranks of one host, against what it could be made of, in one run.

    python benchmarks/python/sequence_exchange.py [--ranks 2,4,8] [--sizes 4K,64K,1M,4M,16M,64M,256M] [--json FILE]

Sizes are the bytes of queries, keys and values of one rank together. Contenders take turns, in blocks:
``exchange``: deepspeed's, from [batch, sequence, heads, size]; ``packed``: copies into one buffer, all_to_all_single of
deepspeed.comm, and ``torch.cat``; ``gloo``: as packed, with torch's all_to_all_single. Beside them, with buffers that
are there: ``all_to_all`` of flat tensors, ``all_gather`` of as many bytes (which reads one part for all), both of
deepspeed.comm, and ``copy``: as many bytes read and written by each rank for itself, all at the same time. Each is
checked before it is timed. ``copied``: the ratio of exchange to all_gather counted in bytes that are copied, the limit
where ranks outnumber cores: an exchange copies (2 n - 1) / n of its bytes, an all_gather (n + 1) / n of them. A rank
of the largest size takes about 2 GB.
"""

import argparse
import statistics
import time

from common import ranks

HEADS, WIDTH = 16, 64


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--sizes", default="4K,64K,1M,4M,16M,64M,256M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def bytes_of(text):
    return int(text[:-1]) << {"K": 10, "M": 20}[text[-1]]


def packed(torch, all_to_all, tensors, world):
    """As it was: every rank's heads behind each other, one all_to_all, and the parts put together."""
    count = HEADS // world
    sent = torch.cat([x.narrow(2, r * count, count).reshape(-1) for r in range(world) for x in tensors])
    received = torch.empty_like(sent)
    all_to_all(received, sent)
    shape = [*tensors[0].shape[:2], count, WIDTH]
    pieces = received.view(world, len(tensors), *shape)
    return [torch.cat(list(pieces[:, i]), 1) for i in range(len(tensors))]


def work(args):
    import torch
    import torch.distributed as dist

    import deepspeed
    from common import machine
    from deepspeed import comm
    from deepspeed.sequence import exchange
    from deepspeed.sequence.heads import shares

    torch.set_num_threads(1)
    deepspeed.log.logger.setLevel("WARNING")
    deepspeed.init_distributed("gloo")
    rank, world = comm.get_rank(), comm.get_world_size()
    group, runs, found = comm.get_world_group(), [shares(HEADS, world)] * 3, {}
    for size in map(bytes_of, args.sizes.split(",")):
        length = max(1, size // (3 * HEADS * WIDTH * 4))
        tensors = [torch.randn(1, length, HEADS, WIDTH) for _ in range(3)]
        mine = torch.cat([x.reshape(-1) for x in tensors])[: length * 3 * HEADS * WIDTH // world]
        every = torch.empty(mine.numel() * world)
        one, other = torch.ones(every.numel()), every
        contenders = {
            "exchange": lambda t=tensors: exchange.exchanged(t, runs, group, 0, True),
            "packed": lambda t=tensors: packed(torch, comm.all_to_all_single, t, world),
            "all_to_all": lambda a=one, b=other: comm.all_to_all_single(b, a),
            "copy": lambda a=one, b=other: b.copy_(a),
            "all_gather": lambda m=mine, e=every: comm.all_gather_into_tensor(e, m),
            "gloo": lambda t=tensors: packed(torch, dist.all_to_all_single, t, world),
        }
        expected = contenders["gloo"]()
        for name in ("exchange", "packed"):
            assert all(torch.equal(a, b) for a, b in zip(contenders[name](), expected))
        times, block = {name: [] for name in contenders}, max(1, min(100, (16 << 20) // size))
        for turn in range(args.rounds):
            for name in contenders if turn % 2 else reversed(contenders):
                contenders[name]()
                comm.barrier()
                start = time.perf_counter()
                for _ in range(block):
                    contenders[name]()
                times[name].append((time.perf_counter() - start) / block * 1e3)
        row = {name: statistics.median(values) for name, values in times.items()}
        ratio = {
            name: statistics.median(a / b for a, b in zip(times["exchange"], times[name]))
            for name in times
            if name != "exchange"
        }
        copied = (2 * world - 1) / (world + 1)
        found[f"{size >> 10} KB"] = {"ms": row, "exchange_over": ratio, "copied": copied}
        if rank == 0:
            each = "  ".join(f"{name} {ms:9.3f} ms" for name, ms in row.items())
            against = f"exchange / all_gather {ratio['all_gather']:.2f}, copied {copied:.2f}"
            each = "  ".join(f"{name} {ms:9.3f} ms" for name, ms in row.items())
            against = f"exchange / all_gather {ratio['all_gather']:.2f}, copied {copied:.2f}"
            print(f"{world} ranks {size >> 10:7d} KB  {each}   {against}", flush=True)
    if rank == 0:
        machine.write_json(args.json, "sequence_exchange", found, ranks=world)
    comm.barrier()
    comm.destroy_process_group()


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    found = None
    for count in map(int, args.ranks.split(",")):
        one = ranks.measure(__file__, args, ("sizes", "rounds"), count)
        found = found or {**one, "figures": {}}
        found["figures"][f"{count} ranks"] = one["figures"]
    ranks.show(found, args.json)


if __name__ == "__main__":
    main()
