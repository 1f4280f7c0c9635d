"""The commit of a checkout, without git."""

import os
import shutil
import subprocess

import pytest

from deepspeed import git_version_info
from deepspeed.host.source_tree import commit

HASH = "8cd046f1aa00000000000000000000000000bbbb"


def test_files(tmp_path):
    assert commit(str(tmp_path)) == ("[none]", "[none]")
    git = tmp_path / ".git"
    (git / "refs" / "heads" / "feature").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/feature/x\n")
    assert commit(str(tmp_path)) == ("[none]", "feature/x")  # nothing is committed yet
    (git / "packed-refs").write_text(f"# pack-refs\n{HASH} refs/heads/feature/x\n^abc\n")
    assert commit(str(tmp_path)) == ("8cd046f", "feature/x")
    (git / "refs" / "heads" / "feature" / "x").write_text("1" * 40 + "\n")
    assert commit(str(tmp_path)) == ("1111111", "feature/x")
    (git / "HEAD").write_text(HASH + "\n")
    assert commit(str(tmp_path)) == ("8cd046f", "[none]")


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
def test_a_real_checkout_and_a_worktree(tmp_path):
    def git(*words, cwd=tmp_path / "tree"):
        return subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=cwd, check=True,
                              capture_output=True, text=True).stdout.strip()  # fmt: skip

    (tmp_path / "tree").mkdir()
    git("init", "-b", "trunk")
    git("commit", "--allow-empty", "-m", "first")
    git("worktree", "add", "-b", "side", str(tmp_path / "side"))
    wanted = git("rev-parse", "HEAD")[:7]
    assert commit(str(tmp_path / "tree")) == (wanted, "trunk") and commit(str(tmp_path / "side")) == (wanted, "side")


def test_this_tree():
    if os.path.exists(os.path.join(git_version_info.ROOT, ".git")):
        assert (git_version_info.git_hash, git_version_info.git_branch) == commit(git_version_info.ROOT)
        assert git_version_info.git_hash != "[none]"
