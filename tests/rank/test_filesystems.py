"""Which file system a path lies on."""

import pytest
from phalanx.rank import filesystems

TABLE = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 27 0:40 / /scratch rw,relatime shared:1 master:2 - lustre 10.0.0.1@o2ib:/scratch rw
32 31 0:41 / /scratch/local rw - tmpfs tmpfs rw
33 27 0:42 /home /home/with\\040space rw,nosuid - nfs4 server:/home rw
34 27 0:43 / /sw rw - fuse.cvmfs2 cvmfs2 ro
"""


@pytest.mark.parametrize("path, kind, network", [
    ("/data/model", "ext4", False),
    ("/scratch/model", "lustre", True),
    ("/scratch", "lustre", True),
    ("/scratchy", "ext4", False),
    ("/scratch/local/model", "tmpfs", False),
    ("/home/with space/model", "nfs4", True),
    ("/sw/models", "fuse.cvmfs2", True),
])  # fmt: skip
def test_the_innermost_mount_counts(tmp_path, monkeypatch, path, kind, network):
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    monkeypatch.setattr(filesystems, "MOUNTS", table)
    assert filesystems.kind(filesystems.Path(path)) == kind
    assert filesystems.is_network(kind) == network


def test_images_and_overlays_are_local():
    assert not any(map(filesystems.is_network, ("overlay", "xfs", "unknown", "fuse.squashfuse", "fuseblk")))


def test_here(tmp_path, monkeypatch):
    assert filesystems.kind(tmp_path) != "unknown"
    monkeypatch.setattr(filesystems, "MOUNTS", tmp_path / "none")
    assert filesystems.kind(tmp_path) == "unknown"
