"""The contents of the manifest; damage anywhere is found and located."""

import json
import os
import zlib

import pytest

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.read import cli
from deepspeed.checkpoint.read.cli import main
from deepspeed.checkpoint.write import verify
from places import PEERS
from refusals import refused

PARTS = {"a.weight": b"\1" * 700, "b.weight": b"\2" * 900}


def make(directory, tag, step=1, saved_at=1000.0):
    """A checkpoint of one file with a head, two tensors and a tail."""
    folder = directory / tag
    folder.mkdir(parents=True)
    data, tensors = b"head" * 16, []
    for name, part in PARTS.items():
        tensors.append({"name": name, "offset": len(data), "bytes": len(part), "crc32": zlib.crc32(part)})
        data += part
    data += b"tail" * 8
    (folder / "mp_rank_00_model_states.pt").write_bytes(data)
    record = {"name": "mp_rank_00_model_states.pt", "bytes": len(data), "crc32": zlib.crc32(data), "tensors": tensors}
    facts = {"tag": tag, "saved_at": saved_at, "global_steps": step, "zero_stage": 0, "world_size": 1}
    (folder / verify.NAME).write_text(verify.text_of(facts, {record["name"]: record}))
    return folder


@pytest.fixture
def folder(tmp_path):
    return make(tmp_path, "one")


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_round_trip(tmp_path, folder):
    facts = verify.read(folder)
    assert facts["tag"] == "one" and facts["version"] == verify.VERSION
    assert verify.missing_or_short(folder, facts) == [] and verify.verify_folder(folder) == []
    assert verify.read(tmp_path) is None


def test_a_flipped_bit_of_the_manifest_is_found_anywhere(folder):
    path = folder / verify.NAME
    good = path.read_bytes()
    for position in range(len(good)):
        flip(path, position, position % 8)
        refused(verify.DamagedManifest, "damaged", verify.read, folder)
        path.write_bytes(good)


def test_a_flipped_bit_of_a_file_is_found_and_located(folder):
    path = folder / "mp_rank_00_model_states.pt"
    good = path.read_bytes()
    for position in range(0, len(good), 7):
        flip(path, position, position % 8)
        (problem,) = verify.verify_folder(folder)
        expected = None if not 64 <= position < 1664 else "a.weight" if position < 764 else "b.weight"
        assert (problem.file, problem.tensor) == (path.name, expected)
        path.write_bytes(good)


def test_missing_and_short_files(folder):
    path = folder / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-1])
    facts = verify.read(folder)
    assert verify.missing_or_short(folder, facts) == [f"{path.name} is damaged: it has 1695 bytes, 1696 were saved"]
    assert "has 1695 bytes" in str(verify.verify_folder(folder)[0])
    path.unlink()
    assert verify.missing_or_short(folder, facts) == [f"{path.name} is missing"]
    assert "is missing" in str(verify.verify_folder(folder)[0])


def test_ls_and_verify_as_commands(tmp_path, capsys):
    make(tmp_path, "global_step2", step=2, saved_at=2000.0)
    make(tmp_path, "global_step1")
    make(tmp_path, ".global_step3.saving")
    (tmp_path / names.LATEST).write_text("global_step2")
    assert main(["ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tag", "global_step1", "global_step2"]
    assert "(latest)" in lines[2] and "complete" in lines[1]
    assert main(["ls", "--json", str(tmp_path)]) == 0
    assert [entry["tag"] for entry in json.loads(capsys.readouterr().out)] == ["global_step1", "global_step2"]
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("every byte is right") == 2
    flip(tmp_path / "global_step1" / "mp_rank_00_model_states.pt", 100)
    assert main(["verify", str(tmp_path / "global_step1")]) == 1
    assert "mp_rank_00_model_states.pt: tensor 'a.weight': bytes 64 to 764 differ" in capsys.readouterr().out
    (tmp_path / names.LATEST).write_text("gone")
    assert main(["verify", str(tmp_path)]) == 1
    assert "names 'gone', which is not a checkpoint here" in capsys.readouterr().out


def test_nothing_there_is_said(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "no")]) == 2 and main(["ls", str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_peer_files_have_no_manifest(tmp_path):
    folder = os.path.join(PEERS, "stage2-fp32-2ranks")
    assert verify.verify_folder(os.path.join(folder, "global_step4")) == []
    assert cli.checkpoints_of(folder)[0].state == "unknown"
