"""Builds the extension module with CMake, once, and drops it into the package.

The module is compiled against the torch that the environment runs, also where pip isolates the build from it;
``pip install --no-build-isolation .`` (or ``-e .``) does without the isolation and without a network. Metadata lives
here and not in pyproject.toml because setuptools 61 to 80+ agree on this spelling only.
docs/tutorials/install-and-ops.md lists the environment variables.
"""

import glob
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys
from types import SimpleNamespace

from setuptools import Extension, find_packages, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(ROOT, "python", "deepspeed")
CUDA_LIBRARY = "libds_kernels_cuda.so"


def run(*path):
    """The names of a Python file of this tree that needs nothing else of it: the package is not importable yet."""
    return SimpleNamespace(**runpy.run_path(os.path.join(ROOT, *path)))


options = run("tools", "build_options.py")
toolkit = run("python", "deepspeed", "host", "cuda_toolkit.py")
VERSION = run("python", "deepspeed", "version.py").__version__
nccl_version = run("python", "deepspeed", "host", "torch_nccl.py").nccl_version
GIT_HASH, GIT_BRANCH = run("python", "deepspeed", "host", "source_tree.py").commit(ROOT)


def torch_facts():
    """``__version__``, ``cuda``, ``hip`` and ``nccl`` of the torch that this environment runs, and the environment
    variables of processes that see it: pip hides it from an isolated build by a PYTHONPATH of its own, in this process.

    Read without importing torch.
    """
    spec = importlib.util.find_spec("torch")
    folder, env = (spec.submodule_search_locations[0] if spec else ""), dict(os.environ)
    if not folder:
        env = {name: value for name, value in env.items() if name not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
        code = (
            "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
        )
        folder = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip()
    if not folder:
        raise SystemExit(
            "deepspeed is compiled against your torch, and this build sees none. If torch is installed, the build is "
            "isolated from it: run `pip install --no-build-isolation .`. Otherwise install torch first."
        )
    facts = runpy.run_path(os.path.join(folder, "version.py"))
    return {**facts, "nccl": nccl_version(folder) if facts.get("cuda") else None}, env


class CleanBuild(build):
    """Starts from an empty package folder: setuptools would keep what an older build left there."""

    def run(self):
        shutil.rmtree(os.path.join(self.build_lib, "deepspeed"), ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Runs CMake and Ninja in build/<tag>/ of the source tree, where `make` builds as well."""

    def run(self):
        self.torch, self.env = torch_facts()
        version = str(self.torch["__version__"]).split("+")[0]
        self.tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{version}"
        try:
            options.check_torch(str(self.torch["__version__"]))
            rows = run("python", "deepspeed", "ops", "op_table.py").OPS
            self.cuda = options.wants_cuda(rows, os.environ, toolkit.find_nvcc(), self.torch.get("cuda"))
            self.build_tree()
        except options.OptionError as error:
            raise SystemExit(f"deepspeed is not built: {error}") from error
        if not self.editable_mode:
            for source, target in self.copies():
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(source, target)
            self.write_build_info()

    def build_tree(self):
        missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
        if missing:
            raise SystemExit(
                f"{' and '.join(missing)} not found: install them with `pip install cmake ninja` or, on Debian, "
                "`apt-get install cmake ninja-build`, and install again."
            )
        folder = os.path.join(ROOT, "build", self.tag)
        configure = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-DDS_BUILD_CUDA={'ON' if self.cuda else 'OFF'}", *options.cmake_flags(os.environ)]
        ninja = ["ninja", "-C", folder, "native", *options.job_flags(self.parallel, os.environ)]
        for command in (configure, ninja):
            if subprocess.run(command, env=self.env).returncode != 0:
                raise SystemExit(f"deepspeed did not build: `{' '.join(command)}` failed; its messages are above.")

    def copies(self):
        """(built file, place in the wheel): this environment's module and the kernel libraries, no other module."""
        lib = os.path.join(PACKAGE, "_lib")
        built = glob.glob(os.path.join(lib, self.tag, "_C*.so")) + glob.glob(os.path.join(lib, "*.so"))
        if not self.cuda:  # that of an older build may lie there
            built = [path for path in built if os.path.basename(path) != CUDA_LIBRARY]
        return [(path, os.path.join(self.build_lib, "deepspeed", os.path.relpath(path, PACKAGE))) for path in built]

    def build_info_path(self):
        return os.path.join(self.build_lib, "deepspeed", "_build_info.py")

    def write_build_info(self):
        """What deepspeed.git_version_info says in an installed package."""
        short = lambda text: ".".join(str(text).split("+")[0].split(".")[:2]) if text else "0.0"  # noqa: E731
        torch_info = {"version": "__version__", "cuda_version": "cuda", "nccl_version": "nccl", "hip_version": "hip"}
        has_cuda = self.torch.get("cuda") and any(source.endswith(CUDA_LIBRARY) for source, _ in self.copies())
        facts = {
            "version": self.distribution.get_version(),
            "git_hash": GIT_HASH,
            "git_branch": GIT_BRANCH,
            "torch_info": {key: short(self.torch.get(name)) for key, name in torch_info.items()},
            "accelerator_name": os.environ.get("DS_ACCELERATOR") or ("cuda" if has_cuda else "cpu"),
        }
        with open(self.build_info_path(), "w", encoding="utf-8") as file:
            file.write('"""Written by setup.py: what this package was built from."""\n\n')
            file.writelines(f"{name} = {value!r}\n" for name, value in facts.items())

    def get_outputs(self):
        return [] if self.editable_mode else [target for _, target in self.copies()] + [self.build_info_path()]

    def get_output_mapping(self):
        return {}  # an editable install uses the files in python/deepspeed/_lib where they are


def version():
    try:
        return options.full_version(VERSION, GIT_HASH, os.environ)
    except options.OptionError as error:
        raise SystemExit(f"deepspeed is not built: {error}") from error


with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
    long_description = readme.read()

# Published names; none of them is needed to train.
EXTRAS = {
    "quickstart": ["matplotlib", "psutil", "rich"],
    "dev": ["pytest", "ruff"],
    "1bit": ["mpi4py"],
    "1bit_adam": ["mpi4py"],
    "1bit_mpi": ["mpi4py"],
    "autotuning": ["tabulate"],
    "autotuning_ml": ["tabulate", "xgboost"],
    "readthedocs": ["docutils", "sphinx"],
    "sparse_attn": [],
    "sparse": [],
    "inf": ["transformers"],
    "sd": ["diffusers", "transformers"],
    "triton": ["triton"],
    "deepcompile": [],
}

setup(
    name="deepspeed",
    version=version(),
    description="Train and serve large models on many processes, with a C++ core",
    long_description=long_description,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=["torch>=1.13.0a0", "numpy"],
    extras_require={**EXTRAS, "all": sorted({name for names in EXTRAS.values() for name in names})},
    package_dir={"": "python"},
    packages=find_packages(
        "python", include=["deepspeed", "deepspeed.*"], exclude=["deepspeed._lib", "deepspeed._lib.*"]
    ),
    include_package_data=False,
    ext_modules=[Extension("deepspeed._C", sources=[])],
    cmdclass={"build": CleanBuild, "build_ext": CMakeBuild},
    zip_safe=False,
    entry_points={
        "console_scripts": [
            "deepspeed = deepspeed.launcher.runner:main",
            "deepspeed.pt = deepspeed.launcher.runner:main",
            "ds = deepspeed.launcher.runner:main",
            "ds_report = deepspeed.env_report:cli_main",
            "dsr = deepspeed.env_report:cli_main",
            "ds_config = deepspeed.config.cli:main",
            "ds_io = deepspeed.nvme:ds_io_main",
            "ds_nvme_tune = deepspeed.nvme.perf_run_sweep:main",
            "ds_ssh = deepspeed.launcher.on_hosts:main",
            "ds_elastic = deepspeed.elasticity.cli:main",
            "ds_bench = deepspeed.comm.bench:main",
            "ds_plan = deepspeed.planner.cli:main",
            "ds_ckpt = deepspeed.checkpoint.read.cli:main",
            "ds_postmortem = deepspeed.diagnosis.cli:main",
        ],
    },
)
