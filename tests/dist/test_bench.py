"""ds_bench measures every operation among the ranks of a job."""

import contextlib
import io

from deepspeed.comm import bench
from harness import run_ranks


def measured(rank, world):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert bench.main("--scan --maxsize 3 --trials 1 --warmups 0 --bw-unit GBps --raw".split()) == 0
    return said.getvalue()


def test_ds_bench_measures_every_operation():
    said, other = run_ranks(2, measured, env={"DS_ACCELERATOR": "cpu"})
    assert other == ""
    for name in bench.OPS:
        assert f"---- {name} on 2 rank(s), float ----" in said
    rows = said.split("---- all_reduce")[1].split("----")[1].strip().splitlines()
    assert rows[0] == "Size\tDuration\tThroughput (GBps)\tBusBW (GBps)"
    assert [row.split("\t")[0] for row in rows[1:]] == ["4", "8", "16", "32"]
