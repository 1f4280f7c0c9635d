"""What a build and the scripts use, and which Debian package brings each: nothing may come from outside
packages/debian.txt.

A machine on which somebody installed a package by hand hides that it is missing from the list; these functions ask
dpkg who owns every header, library, program and Python module that is really used, and follow `Depends` (never
`Recommends`: packages are installed without them) from the list.
"""

import ast
import functools
import importlib.machinery
import os
import re
import shutil
import subprocess

from sentences import read, texts

# A fresh Debian machine has these before the first command.
GIVEN = {"apt", "make", "git", "ca-certificates"}

# Used where they are there, never needed: (what, owner's name begins with).
OPTIONAL_HEADERS = ("cuda-", "libnccl", "libcu", "nvidia-")
OPTIONAL_PROGRAMS = {"sudo": "root does not need it", "nvcc": "CUDA kernels are built where it is found"}

# Rooms that every environment compiles, also one with a torch of its own: group `build` alone must do for them.
ROOMS_WITHOUT_TORCH = ("base", "config", "plan", "kernels", "io", "optim")

# `python -m venv` fails without ensurepip, which Debian cuts out of the standard library.
MODULE_NEEDS = {"venv": "ensurepip"}


def listed(text):
    """packages/debian.txt as {package: set of groups}."""
    rows = filter(None, (line.split("#")[0].split() for line in text.splitlines()))
    return {name: set(groups.split(",")) for name, groups, *_ in rows}


def packages_of(rows, *groups):
    return {name for name, mine in rows.items() if mine & set(groups)}


@functools.lru_cache(maxsize=None)
def installed():
    """{package: (list of alternatives, one for each dependency)}, {virtual package: its providers}, the base system."""
    out = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package}\t${Pre-Depends}, ${Depends}\t${Provides}\t${Essential} ${Priority}\n"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    depends, provides, base = {}, {}, set()
    for line in out.splitlines():
        name, needs, gives, status = line.split("\t")
        depends[name] = [[_bare(one) for one in item.split("|")] for item in needs.split(",") if item.strip()]
        for item in gives.split(","):
            if item.strip():
                provides.setdefault(_bare(item), []).append(name)
        if "yes" in status or "required" in status:
            base.add(name)
    return depends, provides, base


def _bare(text):
    return re.split(r"[\s:(\[]", text.strip())[0]


def closure(names):
    """What apt-get install --no-install-recommends brings for these, with the base system."""
    depends, provides, base = installed()
    found, queue = set(), [*names, *base, *GIVEN]
    while queue:
        name = queue.pop()
        if name in found:
            continue
        found.add(name)
        for alternatives in depends.get(name, ()):
            for one in alternatives:
                if one in depends or one in provides:
                    queue += [one] if one in depends else provides[one]
                    break
    return found


def owners(paths):
    """{path: package} for the paths that a package owns; links are followed, /lib and /usr/lib are one."""
    spellings = {}
    for path in paths:
        target = os.path.realpath(path)
        for spelling in {path, target, re.sub(r"^/usr(?=/(lib|bin|sbin))", "", target)}:
            spellings.setdefault(spelling, []).append(path)
    found, names = {}, sorted(spellings)
    for start in range(0, len(names), 2000):
        out = subprocess.run(
            ["dpkg-query", "-S", *names[start : start + 2000]], capture_output=True, text=True, env=_plain()
        ).stdout
        for line in out.splitlines():
            who, _, path = line.rpartition(": ")
            for asked in spellings.get(path, ()):
                found.setdefault(asked, _bare(who.split(",")[0]))
    return found


def _plain():
    return {**os.environ, "LC_ALL": "C"}


def of_system(path):
    return path.startswith(("/usr/", "/lib")) and not path.startswith("/usr/local/")


# ---- what was used --------------------------------------------------------------------------------------------------


def build_folders(root):
    """The folders of builds for tests and use; those of sanitizers have other names."""
    base = os.path.join(root, "build")
    names = sorted(os.listdir(base)) if os.path.isdir(base) else []
    return [os.path.join(base, n) for n in names if os.path.exists(os.path.join(base, n, ".ninja_deps"))]


def headers(folder):
    """(object file, system header) for everything that the compiler read, by its own dependency files."""
    out = subprocess.run(["ninja", "-C", folder, "-t", "deps"], capture_output=True, text=True, check=True).stdout
    pairs, current = set(), None
    for line in out.splitlines():
        if line.startswith("    "):
            path = line.strip()
            if current and of_system(os.path.normpath(path)):
                pairs.add((current, os.path.normpath(path)))
        elif line:
            current = line.split(":")[0] if "(VALID)" in line else None
    return pairs


def groups_of(output, with_debian_torch):
    """The groups of packages/debian.txt that may be used to make this file of the build."""
    name = re.sub(r"^CMakeFiles/", "", output)
    room = re.match(r"ds_(\w+)\.dir", name)
    if room and room[1] in ROOMS_WITHOUT_TORCH:
        return {"build"}
    more = {"bench_": {"bench"}, "test_": {"test"}, "fake_": {"test"}, "cuda_": {"test"}}.get(
        name.partition("_")[0] + "_", set()
    )
    return {"build", "torch" if with_debian_torch else "torch2"} | more


def libraries(folder, lib_folder, debian_torch):
    """System libraries on the link lines of this build, and those that its modules load. Of a torch that is not
    Debian's the module loads libraries that only ``import torch`` knows how to find."""
    found = set()
    for line in re.findall(r"^  LINK_LIBRARIES = .*", read(folder, "build.ninja"), re.M):
        found.update(word for word in re.findall(r"/\S+\.(?:so|a)\b", line) if of_system(word))
    folders = [lib_folder] + ([os.path.join(lib_folder, os.path.basename(folder))] if debian_torch else [])
    outputs = [os.path.join(at, n) for at in folders if os.path.isdir(at) for n in os.listdir(at) if ".so" in n]
    for output in outputs:
        out = subprocess.run(["ldd", output], capture_output=True, text=True).stdout
        found.update(path for path in re.findall(r"=> (/\S+)", out) if of_system(path))
    return {path for path in found if os.path.exists(path)}


def cmake_programs(folder):
    """The compiler, ninja, cmake, ccache: what CMake wrote down."""
    wanted = r"^(CMAKE_CXX_COMPILER|CMAKE_MAKE_PROGRAM|CMAKE_COMMAND|CCACHE|CMAKE_LINKER|CMAKE_AR)(?::\w+)?=(/\S+)$"
    return {path for _, path in re.findall(wanted, read(folder, "CMakeCache.txt"), re.M)}


# ---- what scripts call ----------------------------------------------------------------------------------------------

_BUILTINS = set(
    "alias break builtin case cd command compgen continue declare do done echo elif else esac eval exec "
    "exit export false fi for function getopts hash if in jobs let local mapfile popd printf pushd pwd read "
    "readarray return select set shift shopt source test then time times trap true type ulimit umask "
    "unset until wait while [ [[ ]] { } ! : .".split()
)
_PREFIXES = set("! { if then else elif do while until exec command time as_root env nohup".split())


def shell_programs(text):
    """Words in command position of a shell script, without builtins, keywords and functions that it defines."""
    text = re.sub(r"\\\n", " ", text)
    text = re.sub(r"<<-?\s*'?(\w+)'?([^\n]*)\n.*?\n\s*\1(?=\n|\)|$)", r"\2\n", text, flags=re.S)  # here-documents
    text = re.sub(r"(?m)(^|\s)#[^\n]*", r"\1", text)
    functions = set(re.findall(r"(?m)^\s*([A-Za-z_]\w*)\s*\(\)", text))
    text = re.sub(r"'[^']*'", " '' ", text)
    text = re.sub(r"\$\{[^{}]*\}", "VALUE", text)
    inner = []
    while True:  # commands inside $( ), innermost first, each becomes a line of its own
        match = re.search(r"[$<>]\(([^()]*)\)", text)
        if not match:
            break
        inner.append(match[1])
        text = text[: match.start()] + " SUBSTITUTED " + text[match.end() :]
    text = re.sub(r'"(?:[^"\\]|\\.)*"', ' "" ', text)
    text = re.sub(r"\w*\+?=\([^)]*\)", " ", text)  # arrays
    text = re.sub(r"(\bin|;;)\s+[^\s()]+\)", r"\1 ;", text)
    text = re.sub(r"(?m)^\s*[^\s()|&;]*(\|[^\s()]*)*\)\s", " ", text)  # patterns of case
    text = "\n".join([text, *(re.sub(r'"(?:[^"\\]|\\.)*"', ' "" ', part) for part in inner)])
    found = set()
    for command in re.split(r"\|\||&&|[|;&\n(){}]|\b(?:then|do|else)\b", text):
        words = command.split()
        while words and (words[0] in _PREFIXES or re.match(r"^[A-Za-z_]\w*\+?=", words[0])):
            words.pop(0)
        if words and words[0] == "xargs":
            found.add("xargs")
            words = [word for word in words[1:] if not re.match(r"^-|^\d+$|^\"\"$", word)]
        if words and re.fullmatch(r"[a-z][\w.+-]*", words[0]) and words[0] not in _BUILTINS | functions:
            found.add(words[0])
    return found


def python_modules(folders, root):
    """Modules that these Python files import, ours and the standard library's included: at the top, and anywhere in
    examples, whose late imports are not optional on the machine of a newcomer."""
    found = {}
    for path, text in texts(root, [".py"], folders, without=()).items():
        tree = ast.parse(text)
        for node in ast.walk(tree) if path.startswith("examples/") else tree.body:
            modules = [item.name for item in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.split(".")[0], path)
    return found


def module_file(module):
    """Where a top-level module lies, or None. Asks the path only: setuptools' finder changes itself when asked for
    pip."""
    spec = importlib.machinery.PathFinder.find_spec(module)
    return spec.origin if spec else None


def program_file(name):
    return shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin")


# ---- the checks -----------------------------------------------------------------------------------------------------


def check(rows, used):
    """One message for each thing in `used` (a set of (what, owner, groups, user)) that these rows do not bring."""
    problems, reach = {}, {}
    for what, owner, groups, user in sorted(used, key=str):
        key = frozenset(groups)
        if key not in reach:
            reach[key] = closure(packages_of(rows, *groups))
        if owner not in reach[key]:
            problems.setdefault((owner, key), f"{user} uses {what}, which comes from the Debian package {owner}.")
    return [
        f"{text} On a fresh machine it is missing there: add {owner} to packages/debian.txt (group "
        f"{' or '.join(sorted(groups))})."
        for (owner, groups), text in problems.items()
    ]


def used_by_build(folder, lib_folder):
    """What `check` takes, for one build folder."""
    debian_torch = _debian_torch(folder)
    crossed = frozenset({"cpu"}) if os.path.basename(folder) == "aarch64" else frozenset()  # tools/test_cpu.sh makes it
    pairs = headers(folder)
    owner = owners({path for _, path in pairs})
    used = set()
    for output, path in pairs:
        package = owner.get(path)
        if package and not package.startswith(OPTIONAL_HEADERS):
            used.add((path, package, crossed | groups_of(output, debian_torch), f"the build of {output}"))
    groups = crossed | {"build", "torch" if debian_torch else "torch2", "test", "bench"}
    for path, package in owners(libraries(folder, lib_folder, debian_torch)).items():
        if not package.startswith(OPTIONAL_HEADERS):
            used.add((path, package, groups, "the link line or a module of the build"))
    for path, package in owners(cmake_programs(folder)).items():
        used.add((path, package, crossed | {"build"}, f"CMake in {os.path.basename(folder)}"))
    return used


@functools.lru_cache(maxsize=None)
def used_by_scripts(root):
    """What `check` takes, for tools/*.sh, .ci/run and the Makefile; and (script, word) where no package has the
    program."""
    paths = [os.path.join(root, "tools", name) for name in sorted(os.listdir(os.path.join(root, "tools")))]
    paths = [path for path in paths if path.endswith(".sh")] + [os.path.join(root, ".ci", "run")]
    scripts = {os.path.relpath(path, root): read(path) for path in paths}
    recipes = [line.lstrip("@-").replace("$$", "$") for line in re.findall(r"^\t(.*)", read(root, "Makefile"), re.M)]
    scripts["Makefile"] = "\n".join(recipes)
    every = frozenset({"build", "torch", "torch2", "test", "cpu", "bench", "lint"})
    defined = set().union(*(re.findall(r"(?m)^\s*([A-Za-z_]\w*)\s*\(\)", text) for text in scripts.values()))
    asked = []  # (script, what, file)
    for name, text in scripts.items():
        programs = sorted(shell_programs(text) - defined - set(OPTIONAL_PROGRAMS))
        asked += [(name, program, program_file(program)) for program in programs]
        run = re.findall(r"(?:python3?|\$PY\"?|python\"?) -m (\w+)", text)
        asked += [(name, f"-m {module}", module_file(MODULE_NEEDS.get(module, module))) for module in run]
        imported = re.findall(r"-c 'import (\w+)'", text)
        asked += [(name, f"-m {module}", module_file(module)) for module in imported]
    owner = owners({path for *_, path in asked if path})
    used = {(what, owner[path], every, name) for name, what, path in asked if path in owner}
    return used, [(name, what) for name, what, path in asked if path not in owner and not what.startswith("-m ")]


def used_by_imports(root):
    """Modules of others that our Python imports at the top and that Debian's Python has."""
    files = python_modules(("python", "tests", "examples", "benchmarks", "tools"), root)
    for module in ("setuptools", "wheel"):  # pyproject.toml's build system
        files[module] = "pyproject.toml"
    paths = {module: module_file(module) for module in files}
    owner = owners({path for path in paths.values() if path and of_system(path)})
    groups = frozenset({"build", "torch", "test"})
    found = {module: owner[path] for module, path in paths.items() if path in owner}
    return {(f"import {module}", package, groups, files[module]) for module, package in found.items()}


def _debian_torch(folder):
    return "/usr/lib/python3/dist-packages/torch/" in read(folder, "build.ninja")
