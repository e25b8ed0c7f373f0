"""Which file systems the nodes of a cluster share, so that what one node reads takes from all."""

from __future__ import annotations

from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "panfs", "wekafs", "pvfs2", "orangefs", "afs", "cifs", "smb3",
    "9p", "virtiofs", "glusterfs", "ocfs2", "gfs2", "dvs",
)  # fmt: skip
# File systems of user processes are remote ones, but for these.
LOCAL_FUSE = ("fuse.squashfuse", "fuse.squashfuse_ll", "fuse.fuse-overlayfs", "fuse.ntfs-3g", "fuse.bindfs")


def kind(path: Path) -> str:
    """The type of the file system that holds `path`, as the kernel names it; "unknown" where it does not tell."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return "unknown"
    whole = str(path.resolve())
    best, found = "", "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")  # a variable number of optional fields ends with the dash
        point = before.split()[4].replace("\\040", " ")
        inside = whole == point or whole.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of several mounts on one point the last is seen
            best, found = point, after.split()[0]
    return found


def is_network(name: str) -> bool:
    """Whether a kind of file system lies across a network."""
    return name in NETWORK or ((name == "fuse" or name.startswith("fuse.")) and name not in LOCAL_FUSE)
