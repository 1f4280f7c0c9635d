"""On which drive a folder is."""

import os

from deepspeed.host import drives
from deepspeed.host.drives import drive_of

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 259:1 / /mnt/a\040drive rw - xfs /dev/nvme0n1 rw
41 27 259:2 / /mnt/a\040drive rw - xfs /dev/nvme1n1 rw
"""


def test_the_longest_mount_that_holds_the_folder_counts(monkeypatch):
    monkeypatch.setattr(drives, "read_text", lambda path: TABLE)
    assert drive_of("/srv") == ("/dev/vda", "ext4", "/")
    assert drive_of("/mnt/a drive/swap") == ("/dev/nvme1n1", "xfs", "/mnt/a drive")
    assert drive_of("/mnt/a drives") == ("/dev/vda", "ext4", "/")


def test_the_drive_of_a_folder(tmp_path):
    device, kind, place = drive_of(tmp_path)
    if place:
        assert device and kind and os.path.ismount(place) and str(tmp_path).startswith(place)
    else:  # in a chroot the mount of the root may be outside, and the system does not say it
        assert drive_of("/") == (device, kind, place) == ("", "", "")
    (tmp_path / "link").symlink_to("/proc")
    assert drive_of(tmp_path / "link") == drive_of("/proc") and drive_of("/proc")[1:] == ("proc", "/proc")
