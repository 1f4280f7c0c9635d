"""Whoever wrote a folder: nothing outside of it, and no file of the user in it, is touched, and nothing hangs."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import signal

import pytest

import hostile_folders as hostile
from deepspeed.checkpoint.layouts.open_saved import open_saved
from deepspeed.checkpoint.read import cli
from deepspeed.checkpoint.write import commit, file_writer, owner, verify
from deepspeed.checkpoint.write.pointer import replace_text
from hostile_folders import MODEL, SHARD, Sandbox, chance_of
from megatron_files import write
from processes import forked
from refusals import refused
from sampling import every_case
from test_universal_convert import convert

REFUSALS = (OSError, RuntimeError, ValueError)
CASES, PARTS = (10_000, 8) if every_case() else (120, 4)


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A checkpoint, and what it converts to."""
    base = tmp_path_factory.mktemp("honest")
    write(str(base / "source"), 1, 1, 2)
    convert(base / "source", base / "universal")
    return base


@pytest.fixture
def sandbox(tmp_path):
    """The sentinels are as they were when the test ends."""
    made = Sandbox(tmp_path / "box")
    yield made
    made.check()


@contextlib.contextmanager
def no_hang():
    """A read of a pipe, or a loop, ends in an error here; the limit is far above what any machine needs."""

    def late(*_):
        raise AssertionError("this case hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(300)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(function, *args, **kwargs):
    with contextlib.suppress(*REFUSALS):
        return function(*args, **kwargs)
    return None


def save(folder, in_place):
    records, staging = {}, commit.begin(folder, in_place)
    try:
        for name in (MODEL, SHARD):
            owner.make_way(staging, name)
            records[name] = file_writer.PreparedBytes(b"new" * 9).write(os.path.join(staging, name))
        commit.finish(folder, staging, {"tag": "t", "saved_at": 2.0}, records)
    except BaseException:
        commit.abandon(folder, staging)
        raise
    replace_text(os.path.join(os.path.dirname(folder), "latest"), "t")


def a_save_into_the_folder(sandbox, chance, _):
    sandbox.plant_links()
    facts, records = hostile.put_files(sandbox, chance)
    if chance.random() < 0.7:
        hostile.put_manifest(sandbox.folder, facts, records, chance, sandbox)
    if chance.random() < 0.6:
        hostile.put_mark(sandbox.folder, chance, sandbox, moving=chance.random() < 0.5)
    hidden = commit.hidden(sandbox.folder, chance.choice(["saving", "replaced", "making", "removing"]))
    if chance.random() < 0.4:  # a swap that somebody pretends to have begun
        if chance.random() < 0.3:
            os.symlink(sandbox.outside, hidden)
        else:
            shutil.copytree(sandbox.folder, hidden, symlinks=True, ignore=shutil.ignore_patterns("pipe"))
            hostile.put_manifest(hidden, facts, records, chance, sandbox)
            if chance.random() < 0.5:
                os.unlink(os.path.join(sandbox.folder, MODEL))
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(sandbox.folder, verify.NAME))
    with open(os.path.join(sandbox.saves, "latest"), "w", errors="surrogatepass") as file:
        file.write(chance.choice(sandbox.names()))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        tried(cli.main, ["ls", sandbox.saves])
        tried(cli.main, ["verify", sandbox.saves])
    tried(commit.path_to_read, sandbox.folder)
    tried(owner.others_files, sandbox.folder)
    faults = ["", "", "exchange:1+:einval", "rename_dir:2+:exdev", "rename_dir:1+:exdev"]
    file_writer.inject_fault(chance.choice(faults))
    try:
        tried(save, sandbox.folder, chance.choice([None, None, False, True]))
        tried(commit.retire, sandbox.saves, 1, chance.choice(["t", "u"]))
        tried(commit.path_to_read, sandbox.folder)
        if chance.random() < 0.3:
            tried(commit.remove_checkpoint, sandbox.folder)
    finally:
        file_writer.inject_fault("")


def a_conversion(sandbox, chance, honest):
    source = os.path.join(sandbox.base, "saves", "source")
    shutil.copytree(honest / "source", source)
    hostile.change_source(source, chance, sandbox.names())
    if chance.random() < 0.5:
        sandbox.plant_links()
    tried(convert, source, sandbox.folder)


def a_universal_folder(sandbox, chance, honest):
    folder = os.path.join(sandbox.saves, "universal")
    shutil.copytree(honest / "universal", folder)
    hostile.change_universal(folder, chance, sandbox)
    if chance.random() < 0.3:
        hostile.put_manifest(folder, {"tag": "universal"}, {}, chance, sandbox)

    def read():
        saved = open_saved(folder, group_names=[["words.weight"]])
        for name in saved.shapes:
            saved.scalars(name)
            for kind in ("fp32", *saved.state_names()):
                for _, numel, reader in saved.pieces(name, kind):
                    reader.read_range(0, numel)

    tried(read)
    if chance.random() < 0.3:
        tried(convert, honest / "source", folder)


def run(number, base, honest):
    chance = chance_of(number)
    kind = a_save_into_the_folder if number % 10 < 8 else a_conversion if number % 10 == 8 else a_universal_folder
    sandbox = Sandbox(base)
    with no_hang():
        kind(sandbox, chance, honest)
    sandbox.check()
    shutil.rmtree(base)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_no_sentinel_is_touched(part, honest, tmp_path):
    for number in range(part, CASES, PARTS):
        try:
            run(number, tmp_path / str(number), honest)
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize(
    "name",
    [
        "{victim}",
        "../../outside/victim",
        "mine/../../../outside/victim",
        "out/victim",
        "file",
        "",
        "..",
        "a//b",
        "a\0b",
    ],
)
def test_a_manifest_that_names_others_files(name, sandbox):
    sandbox.plant_links()
    name = name.format(victim=os.path.join(sandbox.outside, "victim"))
    facts, records = hostile.put_files(sandbox, chance_of(1))
    records[name] = {"name": name, "bytes": len("sentinel victim"), "crc32": 0, "tensors": []}
    pathlib.Path(sandbox.folder, verify.NAME).write_text(verify.text_of(facts, records))
    text = "; ".join(map(str, verify.verify_folder(sandbox.folder)))  # what loading and ds_ckpt verify say
    shown = name.replace("\0", "\\x00")
    assert verify.NAME in text and f"the name '{shown}'" in text, text
    save(sandbox.folder, None)
    assert verify.verify_folder(sandbox.folder) == []


@pytest.mark.parametrize("saved_at", [2**70, float("inf"), float("nan"), -1, "now", None, True, []])
def test_a_manifest_with_a_time_that_is_none(saved_at, tmp_path, capsys):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / verify.NAME).write_text(verify.text_of({"saved_at": saved_at}, {}))
    refused(verify.DamagedManifest, "saved_at", verify.read, tmp_path / "t")
    assert cli.main(["ls", str(tmp_path)]) == 0 and "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("in_place", [False, True])
def test_a_mark_that_names_others_files(in_place, sandbox):
    sandbox.plant_links()
    hostile.put_files(sandbox, chance_of(1))
    mark = {"pid": 1, "files": [*sandbox.names()], "moving": True}
    pathlib.Path(owner.path_in(sandbox.folder)).write_text(json.dumps(mark))
    with no_hang():
        save(sandbox.folder, in_place)
    assert verify.verify_folder(sandbox.folder) == []


def test_a_link_in_the_place_of_a_file_is_not_written_through(sandbox):
    for name in (MODEL, verify.NAME, owner.NAME):
        os.symlink(os.path.join(sandbox.outside, "victim"), os.path.join(sandbox.folder, name))
    save(sandbox.folder, True)
    assert verify.verify_folder(sandbox.folder) == [] and not os.path.islink(os.path.join(sandbox.folder, MODEL))


def test_latest_leads_nowhere_else(sandbox):
    latest = pathlib.Path(sandbox.saves, "latest")
    for text in ("../outside", sandbox.outside, "t/../../outside", "a\0b"):
        latest.write_text(text)
        refused(ValueError, "latest has the name", cli.names.latest_tag, sandbox.saves)
    os.symlink(sandbox.outside, os.path.join(sandbox.saves, "elsewhere"))  # a link that the user has made
    for text in ("t", "elsewhere", "runs/t", "step.1"):
        latest.write_text(text)
        assert cli.names.latest_tag(sandbox.saves) == text


def test_two_processes_replace_latest_at_once(tmp_path):
    path = str(tmp_path / "latest")
    replace_text(path, "a" * 9000)
    start, go = os.pipe()

    def replace_often(letter):
        os.read(start, 1)
        for _ in range(150):
            replace_text(path, letter * 9000)

    first, second = (forked(lambda letter=letter: replace_often(letter)) for letter in "bc")
    os.write(go, b"xx")
    while os.waitpid(first, os.WNOHANG) == (0, 0):
        assert pathlib.Path(path).read_text() in ("a" * 9000, "b" * 9000, "c" * 9000)
    assert os.waitpid(second, 0)[1] == 0 and os.listdir(tmp_path) == ["latest"]


def test_what_killed_processes_left_of_latest_goes(tmp_path):
    path = str(tmp_path / "latest")

    def killed():
        file_writer.inject_fault("rename:1:kill")
        replace_text(path, "one")

    os.waitpid(forked(killed), 0)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".latest.") and left.endswith(".writing")
    (tmp_path / ".latest.mine.writing").write_text("mine")
    replace_text(path, "two")
    assert sorted(os.listdir(tmp_path)) == [".latest.mine.writing", "latest"]
    assert (tmp_path / "latest").read_text() == "two"
