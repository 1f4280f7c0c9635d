"""Development files of system libraries: is the header there, is the library there? Compiles nothing."""

import os
import shlex
import sysconfig

_TRIPLE = sysconfig.get_config_var("MULTIARCH") or ""


def _folders(option, flags, search_path, usual):
    named = [word[len(option) :] for name in flags for word in shlex.split(os.environ.get(name, ""))
             if word.startswith(option)]  # fmt: skip
    return [*named, *filter(None, os.environ.get(search_path, "").split(os.pathsep)), *usual]


def find_header(name):
    """The path of a header in the folders of CFLAGS, CXXFLAGS, CPATH and the usual ones; None where it is not."""
    usual = ["/usr/local/include", f"/usr/include/{_TRIPLE}", "/usr/include"]
    return _first(_folders("-I", ("CFLAGS", "CXXFLAGS", "CPPFLAGS"), "CPATH", usual), name)


def find_library(name):
    """The path of ``lib<name>.so`` (or .a) in the folders of LDFLAGS, LIBRARY_PATH and the usual ones; else None."""
    usual = ["/usr/local/lib", f"/usr/lib/{_TRIPLE}", "/usr/lib64", "/usr/lib", f"/lib/{_TRIPLE}", "/lib"]
    return _first(_folders("-L", ("LDFLAGS",), "LIBRARY_PATH", usual), f"lib{name}.so", f"lib{name}.a")


def _first(folders, *names):
    paths = (os.path.join(folder, name) for folder in folders for name in names)
    return next(filter(os.path.exists, paths), None)


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
