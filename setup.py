"""Builds the extension module with CMake, once, and drops it into the package.

The module is compiled against the torch that the building Python imports, so install with
``pip install --no-build-isolation .`` (or ``-e .``). Metadata lives here and not in pyproject.toml because
setuptools 61 to 80+ agree on this spelling only.
"""

import glob
import importlib.util
import os
import runpy
import shutil
import subprocess
import sys

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.join(ROOT, "python", "deepspeed")


def torch_version():
    """Version of the torch of this Python without its local part, read without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None:
        raise SystemExit(
            "deepspeed is compiled against your torch, and this build sees none. If torch is installed, pip is "
            "building in isolation: run `pip install --no-build-isolation .`. Otherwise install torch first."
        )
    folder = spec.submodule_search_locations[0]
    version = runpy.run_path(os.path.join(folder, "version.py"))["__version__"]
    return str(version).split("+")[0]


class CMakeBuild(build_ext):
    """Runs CMake and Ninja in build/<tag>/ of the source tree, where `make` builds as well."""

    def run(self):
        self.tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-torch{torch_version()}"
        self.build_tree()
        if not self.editable_mode:
            for source, target in self.copies():
                os.makedirs(os.path.dirname(target), exist_ok=True)
                shutil.copy2(source, target)

    def build_tree(self):
        missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
        if missing:
            raise SystemExit(
                f"{' and '.join(missing)} not found: install them with `pip install cmake ninja` or, on Debian, "
                "`apt-get install cmake ninja-build`, and install again."
            )
        folder = os.path.join(ROOT, "build", self.tag)
        configure = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, f"-DPython_EXECUTABLE={sys.executable}"]
        build = ["ninja", "-C", folder, "native"]
        jobs = self.parallel or os.environ.get("MAX_JOBS")
        if jobs:
            build += ["-j", str(jobs)]
        for command in (configure, build):
            if subprocess.run(command).returncode != 0:
                raise SystemExit(f"deepspeed did not build: `{' '.join(command)}` failed; its messages are above.")

    def copies(self):
        """(built file, place in the wheel): this environment's module and the kernel libraries, no other module."""
        lib = os.path.join(PACKAGE, "_lib")
        built = glob.glob(os.path.join(lib, self.tag, "_C*.so")) + glob.glob(os.path.join(lib, "*.so"))
        return [(path, os.path.join(self.build_lib, "deepspeed", os.path.relpath(path, PACKAGE))) for path in built]

    def get_outputs(self):
        return [] if self.editable_mode else [target for _, target in self.copies()]

    def get_output_mapping(self):
        return {}  # an editable install uses the files in python/deepspeed/_lib where they are


with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as readme:
    long_description = readme.read()

setup(
    name="deepspeed",
    version=runpy.run_path(os.path.join(PACKAGE, "version.py"))["__version__"],
    description="Train and serve large models on many processes, with a C++ core",
    long_description=long_description,
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    install_requires=["torch>=1.13.0a0", "numpy"],
    extras_require={"quickstart": ["matplotlib", "psutil", "rich"], "dev": ["pytest", "ruff"]},
    package_dir={"": "python"},
    packages=find_packages(
        "python", include=["deepspeed", "deepspeed.*"], exclude=["deepspeed._lib", "deepspeed._lib.*"]
    ),
    include_package_data=False,
    ext_modules=[Extension("deepspeed._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    zip_safe=False,
    entry_points={
        "console_scripts": [
            "deepspeed = deepspeed.launcher.runner:main",
            "deepspeed.pt = deepspeed.launcher.runner:main",
            "ds = deepspeed.launcher.runner:main",
            "ds_report = deepspeed.env_report:cli_main",
            "ds_config = deepspeed.config.cli:main",
        ],
    },
)
