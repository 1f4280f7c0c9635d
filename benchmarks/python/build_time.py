"""Times of a clean build, and of a rebuild after touching one kernel.

    python benchmarks/python/build_time.py [--python PATH] [--json FILE]

Builds in a temporary folder, without ccache, for the torch of ``--python``; nothing of the source tree is written.
"""

import argparse
import glob
import os
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
from common import machine  # noqa: E402  (the line above finds it from any directory)


def timed(command):
    start = time.perf_counter()
    out = subprocess.run(command, env=dict(os.environ, CCACHE_DISABLE="1"), capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{out.stdout[-3000:]}\n{out.stderr[-3000:]}")
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--tests", action="store_true", help="the C++ tests as well")
    parser.add_argument("--cuda", action="store_true", help="the CUDA kernels as well, where nvcc is found")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    targets = ["native"] + (["tests"] if args.tests else [])
    with tempfile.TemporaryDirectory() as folder:
        options = [f"-DPython_EXECUTABLE={args.python}", f"-DDS_LIB_DIR={folder}/lib", "-DCCACHE=CCACHE-NOTFOUND"]
        options += [
            f"-DDS_BUILD_TESTS={'ON' if args.tests else 'OFF'}",
            f"-DDS_BUILD_CUDA={'ON' if args.cuda else 'OFF'}",
        ]
        ninja = ["ninja", "-C", folder, "-j", str(args.jobs), *targets]
        figures = {"configure_s": timed(["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *options])}
        figures["clean_build_s"] = timed(ninja)
        figures["nothing_to_do_s"] = timed(ninja)
        kernel = sorted(glob.glob(os.path.join(ROOT, "csrc", "kernels", "cpu", "*.cpp")))[0]
        before = os.stat(kernel)
        os.utime(kernel)
        try:
            figures["after_touching_one_kernel_s"] = timed(ninja)
        finally:
            os.utime(kernel, ns=(before.st_atime_ns, before.st_mtime_ns))
    figures["kernel"] = os.path.relpath(kernel, ROOT)
    print(
        f"clean build of {' and '.join(targets)}: {figures['configure_s']:.1f} s to configure, "
        f"{figures['clean_build_s']:.1f} s to build with {args.jobs} jobs; nothing to do: "
        f"{figures['nothing_to_do_s']:.1f} s; after touching {figures['kernel']}: "
        f"{figures['after_touching_one_kernel_s']:.1f} s"
    )
    version = subprocess.run(
        [args.python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    machine.write_json(args.json, "build_time", figures, torch=version, jobs=args.jobs)


if __name__ == "__main__":
    main()
