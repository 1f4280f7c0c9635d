"""Compares ``deepspeed.plan`` with runs: the peak of the device's allocator, collectives, the time of a step, and the
change that it advises where a job does not fit.

    python benchmarks/python/plan_accuracy.py memory --file FILE.jsonl    # stand-in device (torch 2), or --device cuda
    python benchmarks/python/plan_accuracy.py time --file FILE.jsonl      # CPU, or --device cuda
    python benchmarks/python/plan_accuracy.py advice --file FILE.jsonl    # both devices: peaks there, times here
    python benchmarks/python/plan_accuracy.py summary --file FILE.jsonl [--json FILE]

Each configuration is a job of its own. Its figures become a line of FILE, and a configuration that has a line there is
not run again, so that a program that was ended goes on where it was. ``--only`` takes configurations with these words,
or the one of this name. Programs with one FILE may run at the same time: only one measures times.

On ``cuda`` the jobs are those of ``CONFIGURATIONS_ON_A_GPU`` (``common/plan_jobs.py``): one rank, rows of 1,024 tokens.
There ``time`` compares peaks, too.

Ratios are planned to measured. The CPU has no allocator that counts, so peaks are those of ``cuda`` or of ``standin``,
the stand-in device of the tests (torch 2, the CUDA kernels on the CPU and the library that stands in for NCCL), whose
times mean nothing. Every rank has one
thread, on ``cuda`` one for each core. The limit of times on two cores: equal runs differ by up to 8 %. Experts have
equal load in runs, as in plans.
"""

import argparse
import contextlib
import fcntl
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "examples", "quickstart"), os.path.join(ROOT, "tests")]

from common import plan_jobs  # noqa: E402  (the path above makes it importable)

STEPS = 5
NEAR = 0.05  # of the limit: such a change is run to see whether it fits


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("memory", "time", "advice", "summary"))
    parser.add_argument("--file", default="plan_accuracy.jsonl", help="results, a line each (default %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda", "standin"), help="default: standin for memory, else cpu")
    parser.add_argument("--only", default="", metavar="WORDS", help="configurations with all of these words")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = args.device or ("standin" if args.part == "memory" else "cpu")
    return args


def select(device):
    """Makes ``device`` the accelerator of this process and of those that it starts."""
    os.environ["DS_ACCELERATOR"] = device
    if device == "standin":
        folder = os.path.join(ROOT, "tests", "device")
        sys.path[:0] = [folder, os.path.join(folder, "package")]
        import standin_kernels

        os.environ.setdefault("DS_STANDIN_KERNELS", standin_kernels.library_path())
        nccl = os.path.join(os.path.dirname(standin_kernels.library_path()), "libfake_nccl.so")
        os.environ.setdefault("DS_STANDIN_NCCL", nccl)  # which a plan of a device assumes
        without_fused_attention()


def without_fused_attention():
    """As on the stand-in device."""
    import torch

    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def added(calls):
    """Count and bytes by verb."""
    found = {}
    for verb, count, size in calls:
        before = found.get(verb, (0, 0))
        found[verb] = [before[0] + count, before[1] + size]
    return found


def balance_experts():
    """Gates choose all experts equally often."""
    import torch

    from deepspeed.moe import gating

    gate = gating.gate

    def balanced(logits, k, select=None):
        probs, index = gate(logits, k, select)
        chosen = torch.arange(index.numel(), dtype=index.dtype) % logits.shape[1]
        return probs, index.copy_(chosen.view_as(index))

    gating.gate = balanced


# ---- a run -----------------------------------------------------------------------------------------------------------
def work(args):
    """As a rank: what the steps of ``--job`` took; rank 0 writes the figures of all."""
    if args.device == "standin":  # A process has two of these devices.
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % 2)
    select(args.device)
    import deepspeed
    from deepspeed import _native
    from deepspeed import comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.timed import call_log

    deepspeed.logger.setLevel("ERROR")
    balance_experts()
    settings = json.loads(args.settings)
    job = plan_jobs.Job(args.job.split(), settings["rows"], settings["tokens"])
    accelerator, seconds = get_accelerator(), []
    with job.around():
        dist.init_distributed(verbose=False)
        gc.collect()
        before = accelerator.memory_allocated()
        engine = deepspeed.initialize(model=job.model(settings["recomputed"]), config=settings["config"])[0]
        recorder = _native._C.CallRecorder(False)
        given, alone = job.inputs(engine.device), contextlib.ExitStack()
        for number in range(3 if args.device == "standin" else 2 + STEPS):  # whose times mean nothing
            if number == 2:
                if dist.get_rank() == 0:
                    alone.enter_context(nobody_else(settings["lock"]))
                dist.barrier()
                call_log.add(recorder)
                accelerator.reset_peak_memory_stats()
            begin = time.perf_counter()
            for _ in range(settings["config"]["gradient_accumulation_steps"]):
                loss = engine(**given).loss if job.parts else engine(*given)
                engine.backward(loss)
                del loss
                engine.step()
            accelerator.synchronize()
            seconds.append(time.perf_counter() - begin)
            if number == 2:
                call_log.remove(recorder)
                peak = accelerator.max_memory_allocated() - before
    dist.barrier()
    alone.close()
    calls = added((call.op, 1, call.bytes) for call in recorder.take())
    rows = [None] * job.world
    dist.all_gather_object(rows, {"calls": calls, "peak": peak, "seconds": statistics.median(seconds[2:])})
    engine.destroy()
    if dist.get_rank() == 0:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    dist.barrier()


def threads_of(device):
    """Threads of a rank. On a GPU its updates on the host have all cores."""
    return len(os.sched_getaffinity(0)) if device == "cuda" else 1


@contextlib.contextmanager
def nobody_else(path):
    """No other program with this file is in this context."""
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(job, args, config, recomputed=False, rows=None, device=None):
    """The figures of each rank of a job on ``device`` (default: that of ``args``); None: a rank failed."""
    from common import ranks

    settings = {"config": config, "recomputed": recomputed, "rows": rows or job.rows, "tokens": job.tokens}
    settings["lock"] = os.path.abspath(f"{args.file}.lock")
    given = argparse.Namespace(device=device or args.device, job=job.name, settings=json.dumps(settings))
    try:
        return ranks.measure(
            __file__, given, ("device", "job", "settings"), job.world, threads=threads_of(given.device)
        )
    except SystemExit as failed:
        print(f"{job.name}: {failed}", file=sys.stderr)
        return None


# ---- parts -----------------------------------------------------------------------------------------------------------
def planned(job, config, **how):
    import deepspeed

    with job.around():
        return deepspeed.plan(job.model, config, job.world, sample=job.inputs("meta"), **how)


def calls_of(rank):
    return added((verb, count, size) for (verb, _), (count, size) in rank.calls.items())


def memory(job, args, folder):
    plan = planned(job, job.config(folder), ranks=list(range(job.world)))
    ran = run(job, args, job.config(folder))
    return None if ran is None else compared(plan, ran)


def compared(plan, ran):
    """Peaks and calls of all ranks."""
    ratios = [one.peak_bytes / real["peak"] for one, real in zip(plan.ranks, ran)]
    differ = [(calls_of(one), real["calls"]) for one, real in zip(plan.ranks, ran) if calls_of(one) != real["calls"]]
    return {"peak": max(ratios, key=lambda ratio: abs(ratio - 1)), "calls_equal": not differ, "differ": differ[:1]}


def machine_of(args, world):
    """The file of the rates of this machine, with the links of this many ranks."""
    path = f"{args.file}.machine-{world}.json"
    with nobody_else(f"{args.file}.lock"):
        if os.path.exists(path):
            return path
        command = [sys.executable, "-m", "deepspeed.planner.cli", "--profile-machine", "--machine", path]
        subprocess.run([*command, "--world", str(world)], check=True, stdout=subprocess.DEVNULL)
        return path


def timed(job, args, folder):
    from deepspeed.planner.machine import Machine

    machine = Machine.of_jobs(machine_of(args, job.world))
    cores = len(os.sched_getaffinity(0))
    if args.device == "cpu" and job.world > cores:  # the rates are those of a core
        machine.flops = {dtype: rate * cores / job.world for dtype, rate in machine.flops.items()}
        machine.memory, machine.host_step = (r * cores / job.world for r in (machine.memory, machine.host_step))
    plans = {
        "rates": planned(job, job.config(folder), machine=machine),
    }
    with nobody_else(f"{args.file}.lock"):
        plans["measured"] = planned(job, job.config(folder), machine=machine, measure=True)
    ran = run(job, args, job.config(folder))
    if ran is None:
        return None
    seconds = max(one["seconds"] for one in ran)
    ratios = {name: plan.seconds / seconds for name, plan in plans.items()}
    phases = {name: plan.fullest.seconds for name, plan in plans.items()}
    more = compared(plans["rates"], ran) if args.device == "cuda" else {}
    return {**ratios, "seconds": seconds, "phases": phases, **more}


def run_of_change(job, change, args, device):
    """As ``run``; a change of a job runs once on each device for all shares of its memory."""
    key = (change.words, device)
    if key not in job.ran:
        job.ran[key] = run(job, args, change.config, change.recompute, change.micro_batch, device)
    return job.ran[key]


def advice(job, share, args, folder):
    """Whether the advised change fits on ``standin``, and how its speed compares with the best change that fits. A
    change runs there if it is the advised one, or if its planned peak is near the limit: of the others the plan says
    whether they fit. ``failed``: changes whose runs failed."""
    from deepspeed.planner.machine import Machine
    from deepspeed.planner.search import Search

    config, machine = job.config(folder), Machine.of_jobs(machine_of(args, job.world))
    room = int(share * planned(job, config, ranks=[0]).peak_bytes)
    search = Search(
        job.model, config, job.world, room, lambda rows: job.inputs("meta", rows), machine, True, measure=job.times
    )
    advised, rates, failed = search.cheapest_change(), {}, []
    changes = {one.words: one for one in [*search.single_changes, advised] if one and one.plan}
    for words, one in changes.items():
        fits = one.plan.fits
        if one is advised or abs(one.plan.peak_bytes / room - 1) < NEAR:
            ran = run_of_change(job, one, args, "standin")
            failed += [words] if ran is None else []
            fits = ran is not None and max(rank["peak"] for rank in ran) <= room
        ran = run_of_change(job, one, args, args.device) if fits else None
        failed += [words] if fits and ran is None else []
        if ran is not None:
            samples = job.world * one.micro_batch * one.config["gradient_accumulation_steps"]
            rates[words] = samples / max(rank["seconds"] for rank in ran)
    best = max(rates.values(), default=None)
    fits = advised.words in rates if advised else not rates
    speed = rates[advised.words] / best if advised and fits else None
    return {"fits": fits, "speed": speed, "advised": advised and advised.words, "measured": rates, "failed": failed}


def summary(rows):
    """By part: of the errors the worst and the median, and the number of configurations."""
    made = {}
    for name in ("peak", "rates", "measured"):
        errors = [abs(row[name] - 1) for row in rows if name in row and row["part"] != "advice"]
        if errors:
            made[name] = {"worst": max(errors), "median": statistics.median(errors), "configurations": len(errors)}
    made["equal_calls"] = sum(row.get("calls_equal", False) for row in rows)
    found = [row for row in rows if row["part"] == "advice"]
    near = sum((row["speed"] or 0) >= 0.9 for row in found)
    made["advice"] = {"configurations": len(found), "fit": sum(row["fits"] for row in found), "within_10_percent": near}
    return made


def main(args):
    rows = []
    if os.path.exists(args.file):
        with open(args.file, encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
    if args.part == "summary":
        from common import machine

        machine.write_json(args.json, "plan_accuracy", {"summary": summary(rows), "rows": rows})
        print(json.dumps(summary(rows), indent=1))
        return
    select(args.device)
    if args.part == "advice":
        without_fused_attention()
    import torch

    torch.set_num_threads(threads_of(args.device))
    os.environ["OMP_NUM_THREADS"] = str(threads_of(args.device))
    os.environ["XDG_CACHE_HOME"] = f"{os.path.abspath(args.file)}.cache"  # rates of other hours may be others
    jobs = plan_jobs.chosen(args.part, args.device)
    measure = {"memory": memory, "time": timed, "advice": advice}[args.part]
    done = {(row["part"], row["configuration"]) for row in rows}
    names, wanted = [" ".join([job.name, *map(str, more.values())]) for job, more in jobs], set(args.only.split())
    for (job, more), name in zip(jobs, names):
        if (args.part, name) in done or name != args.only and (args.only in names or not wanted <= set(name.split())):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = measure(job, *more.values(), args, folder)
        except Exception as error:  # the others are measured
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        if found is not None:
            line = json.dumps({"part": args.part, "configuration": name, "device": args.device, **found})
            print(line, flush=True)
            with open(args.file, "a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    arguments = parse_arguments()
    work(arguments) if arguments.worker else main(arguments)
