"""When a checkpoint counts as saved, on every kind of file system: killed anywhere, the old or the new one is whole."""

import os
import signal

import pytest

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import commit, file_writer, owner, verify
from deepspeed.checkpoint.write.pointer import replace_text
from processes import forked, forked_until_the_end
from refusals import refused

FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
# Calls that a file system lacks, as orders of DS_IO_FAULT.
EXCHANGE, NO_EXCHANGE = "", "exchange:1+:einval"
LOWER_LAYER = "rename_dir:2+:exdev"  # new folders can be renamed, those that were there before cannot
NO_FOLDERS = "exchange:1+:einval,rename_dir:1+:exdev"
NO_RENAME = "rename:1+:enosys,exchange:1+:enosys,truncate:1+:enotsup"


def save(folder, text, files=FILES, in_place=None):
    """Makes one save, with files of ``text``."""
    folder, records = str(folder), {}
    staging = commit.begin(folder, in_place)
    for name in files:
        records[name] = file_writer.PreparedBytes(text * 1000).write(os.path.join(staging, name))
    commit.finish(folder, staging, {"tag": os.path.basename(folder), "saved_at": 1.0}, records)
    replace_text(os.path.join(os.path.dirname(folder), names.LATEST), os.path.basename(folder))
    return staging


def content(folder):
    """The text with which the checkpoint was saved, all of whose files have it."""
    place = commit.path_to_read(str(folder))
    assert verify.verify_folder(place) == []
    found = {open(os.path.join(place, name), "rb").read()[:1] for name in verify.read(place)["files"]}
    assert len(found) == 1
    return found.pop()


def others(folder):
    """Everything below ``folder`` that is nobody's but the user's."""
    found = {os.path.relpath(os.path.join(root, n), folder) for root, ds, fs in os.walk(folder) for n in (*ds, *fs)}
    return found - {*FILES, verify.NAME, owner.NAME}


USERS = {"ema_model_states.pt", "rank_0.json", "mine", "mine/mp_rank_00_model_states.pt", "mine/checkpoint.json",
         "empty", "empty/inner", "link", "linked"}  # fmt: skip


def put_users_files(folder, elsewhere):
    os.makedirs(folder / "mine")
    os.makedirs(folder / "empty" / "inner")
    for name in ("ema_model_states.pt", "rank_0.json", "mine/mp_rank_00_model_states.pt", "mine/checkpoint.json"):
        (folder / name).write_text(name)
    os.symlink("nowhere", folder / "link")
    os.symlink(elsewhere, folder / "linked")


def killed_while_saving(folder, *orders):
    """Saves b"2" in a process of its own with these faults; whether it was killed."""

    def save_with_faults():
        file_writer.inject_fault(",".join(filter(None, orders)))
        save(folder, b"2")

    status = os.waitpid(forked(save_with_faults), 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("lacks", [EXCHANGE, NO_EXCHANGE, LOWER_LAYER, NO_FOLDERS, NO_RENAME])
def test_files_of_others_stay(lacks, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "x").write_text("x")
    file_writer.inject_fault(lacks)
    save(tmp_path / "t", b"1", (*FILES, "zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    put_users_files(tmp_path / "t", tmp_path / "else")
    (tmp_path / "t" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text("not in the manifest")
    for text in (b"2", b"3"):
        file_writer.inject_fault(lacks)
        save(tmp_path / "t", text)
        # Rank 1's shard was listed and goes; rank 7's was not, and stays.
        assert others(tmp_path / "t") == USERS | {"zero_pp_rank_7_mp_rank_00_optim_states.pt"}
        assert (tmp_path / "t" / "rank_0.json").read_text() == "rank_0.json" and content(tmp_path / "t") == text
        assert os.readlink(tmp_path / "t" / "link") == "nowhere"
        assert (tmp_path / "t" / "linked" / "x").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["else", "latest", "t"]


@pytest.mark.parametrize("damaged", [False, True])
def test_without_a_manifest_published_names_at_the_top_go(damaged, tmp_path):
    folder = tmp_path / "t"
    published = {
        "mp_rank_01_model_states.pt", "zero_pp_rank_3_mp_rank_00_model_states.pt", "layer_03-model_01-model_states.pt",
        "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt", "layer_0_expert_2_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt", "layer_00-model_states.pt", "expert_1_mp_rank_00_model_states.pt",
    }  # fmt: skip
    folder.mkdir()
    put_users_files(folder, tmp_path)
    for name in published | {"checkpoint.json"}:
        (folder / name).write_text(name)
    if damaged:
        (folder / verify.NAME).write_text("{")
    save(folder, b"2")
    assert others(folder) == USERS | {"checkpoint.json"} and content(folder) == b"2"


@pytest.mark.sample("values")
@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("lacks", [EXCHANGE, NO_EXCHANGE, LOWER_LAYER], ids=["exchange", "renames", "files"])
def test_killed_anywhere_the_old_or_the_new_one_is_whole(call, lacks, tmp_path):
    found = []
    for n in range(1, 40):
        save(tmp_path / "t", b"1", (*FILES, "run_rank_00007_state.pt"))
        if n == 1:
            put_users_files(tmp_path / "t", tmp_path)
        was_killed = killed_while_saving(tmp_path / "t", f"{call}:{n}:kill", lacks)
        copy_of_leftovers = sorted(os.listdir(tmp_path))
        found.append(content(tmp_path / "t"))
        assert USERS <= others(tmp_path / "t"), copy_of_leftovers
        save(tmp_path / "other", b"9")  # a save of anything cleans
        assert sorted(os.listdir(tmp_path)) == ["latest", "other", "t"], copy_of_leftovers
        assert others(tmp_path / "t") - {"run_rank_00007_state.pt"} == USERS
        if not was_killed:
            assert found[-1] == b"2"
            break
    # Where the files are moved one by one, the old one is gone after the first, and loading ends the move.
    assert found[0] == b"1" and found == sorted(found) and len(found) > 3


def test_a_read_only_folder_is_read_where_the_swap_has_left_it(tmp_path):
    save(tmp_path / "t", b"1")
    assert killed_while_saving(tmp_path / "t", "rename:3:kill", NO_EXCHANGE) and not (tmp_path / "t").exists()
    file_writer.inject_fault("rename:1+:eio")
    assert content(tmp_path / "t") == b"2" and not (tmp_path / "t").exists()
    file_writer.inject_fault("")
    (tmp_path / ".t.saving" / FILES[0]).write_text("cut")  # the new one is not whole: the old one it is
    assert content(tmp_path / "t") == b"1" and (tmp_path / "t").exists()


@pytest.mark.sample("values")
@pytest.mark.parametrize("lacks", [NO_FOLDERS, NO_RENAME])
@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_killed_in_place_the_other_tags_are_whole_and_this_one_is_known_not_to_be(call, lacks, tmp_path):
    found = set()
    for n in range(1, 20):
        save(tmp_path / "old", b"0", in_place=True)
        was_killed, now = killed_while_saving(tmp_path / "t", f"{call}:{n}:kill", lacks), None
        try:
            now = content(tmp_path / "t")
        except RuntimeError as error:
            words = "was broken off while it was writing it, in place", "complete are: old"
            assert all(word in str(error) for word in words)
        found.add(now)
        assert content(tmp_path / "old") == b"0"
        if not was_killed:
            break
        # Without renames `latest` may be torn, too; it is written when the tag is complete.
        assert names.latest_tag(tmp_path) in (("old",) if now is None else ("old", "", "t"))
    assert found == {None, b"2"} and names.latest_tag(tmp_path) == "t"
    assert sorted(os.listdir(tmp_path)) == ["latest", "old", "t"] and others(tmp_path / "t") == set()


def test_in_place_by_detection_and_by_order(tmp_path):
    file_writer.inject_fault(NO_FOLDERS)
    assert save(tmp_path / "found", b"1") == str(tmp_path / "found")
    refused(OSError, "write_in_place is false: set it to true or null", save, tmp_path / "never", b"1", in_place=False)
    file_writer.inject_fault("rename_dir:1:eio")  # an error, and no property of the file system
    refused(OSError, r"(?s)cannot make the checkpoint folder .*rename", save, tmp_path / "broken", b"1")
    file_writer.inject_fault("")
    assert save(tmp_path / "asked", b"1", in_place=True) == str(tmp_path / "asked")
    assert save(tmp_path / "hidden", b"1") != str(tmp_path / "hidden")
    assert sorted(os.listdir(tmp_path)) == ["asked", "found", "hidden", "latest"]


def test_a_failure_in_the_middle_of_a_swap_is_put_right(tmp_path):
    save(tmp_path / "t", b"1")
    file_writer.inject_fault("rename:3:eio," + NO_EXCHANGE)  # the old one is moved away, the new one cannot come
    staging = commit.begin(str(tmp_path / "t"))
    refused(OSError, "rename", commit.finish, str(tmp_path / "t"), staging, {}, {})
    commit.abandon(str(tmp_path / "t"), staging)
    assert content(tmp_path / "t") == b"1" and sorted(os.listdir(tmp_path)) == ["latest", "t"]
    file_writer.inject_fault("rename:4:eio," + LOWER_LAYER)  # a file cannot be moved, others have been
    refused(OSError, "rename", save, tmp_path / "t", b"2")
    commit.abandon(str(tmp_path / "t"), staging)
    file_writer.inject_fault("")
    assert content(tmp_path / "t") == b"2" and sorted(os.listdir(tmp_path)) == ["latest", "t"]


def test_keep_last_removes_what_is_listed_and_nothing_else(tmp_path):
    for tag in "abcd":
        save(tmp_path / tag, tag.encode())
    (tmp_path / "a" / "notes.txt").write_text("mine")
    os.rename(tmp_path / "b", tmp_path / "elsewhere")
    os.symlink("elsewhere", tmp_path / "b")
    commit.retire(str(tmp_path), 1, "d")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "d", "latest"] and os.listdir(tmp_path / "a") == ["notes.txt"]
    save(tmp_path / "e", b"e")
    file_writer.inject_fault(NO_FOLDERS)
    commit.remove_checkpoint(str(tmp_path / "d"))
    assert not (tmp_path / "d").exists()


def test_a_run_that_is_alive_is_not_disturbed(tmp_path):
    with forked_until_the_end(lambda: commit.begin(str(tmp_path / "t"))) as pid:
        while not (tmp_path / ".t.saving").exists():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        save(tmp_path / "other", b"1")
        assert (tmp_path / ".t.saving").exists()
        refused(OSError, rf"process {pid} on .* is saving the same checkpoint", save, tmp_path / "t", b"1")
    save(tmp_path / "other", b"1")
    assert not (tmp_path / ".t.saving").exists() and owner.others_files(str(tmp_path / "other")) is False
