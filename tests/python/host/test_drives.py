"""On which drive a folder is."""

import os

from deepspeed.host.drives import drive_of


def test_the_drive_of_a_folder(tmp_path):
    device, kind, place = drive_of(tmp_path)
    assert device and kind and os.path.ismount(place) and str(tmp_path).startswith(place)
    (tmp_path / "link").symlink_to("/proc")
    assert drive_of(tmp_path / "link") == drive_of("/proc") and drive_of("/proc")[1:] == ("proc", "/proc")
