"""Development files of system libraries: is the header there, is the library there? Compiles nothing."""

import glob
import os
import shlex
import sysconfig


def _folders(option, flags, search_path, usual):
    named = [word[len(option) :] for name in flags for word in shlex.split(os.environ.get(name, ""))
             if word.startswith(option)]  # fmt: skip
    return [*named, *filter(None, os.environ.get(search_path, "").split(os.pathsep)), *usual]


def find_header(name):
    """The path of a header in the folders of CFLAGS, CXXFLAGS, CPATH and the usual ones; None where it is not."""
    triple = sysconfig.get_config_var("MULTIARCH") or ""
    usual = ["/usr/local/include", f"/usr/include/{triple}", "/usr/include"]
    for folder in _folders("-I", ("CFLAGS", "CXXFLAGS", "CPPFLAGS"), "CPATH", usual):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    return None


def find_library(name):
    """The path of ``lib<name>.so`` (or .a) in the folders of LDFLAGS, LIBRARY_PATH and the usual ones; else None."""
    triple = sysconfig.get_config_var("MULTIARCH") or ""
    usual = ["/usr/local/lib", f"/usr/lib/{triple}", "/usr/lib64", "/usr/lib", f"/lib/{triple}", "/lib"]
    for folder in _folders("-L", ("LDFLAGS",), "LIBRARY_PATH", usual):
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"lib{name}.so"))):
            return path
        static = os.path.join(folder, f"lib{name}.a")
        if os.path.exists(static):
            return static
    return None


def missing_libraries(name, system):
    """Sentences for the user about libraries that the op ``name`` needs and that are missing here.

    Args:
        system: tuples (header, library without ``lib``, Debian package).

    Returns:
        list of sentences, empty when all are there.
    """
    texts = []
    for header, library, package in system:
        if find_header(header) and find_library(library):
            continue
        texts += [
            f"{name} requires the dev lib{library} .so object and headers but these were not found.",
            f"{name}: please install the {package} package with apt",
            f"If lib{library} is already installed (perhaps from source), try setting the CFLAGS and LDFLAGS "
            f"environment variables to where it can be found.",
        ]
    return texts
