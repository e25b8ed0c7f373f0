"""The `phalanx` command with fake ranks and a fake front; as `fake_phalanx.py member`, the small per-rank process."""

import sys
from pathlib import Path

from phalanx.launcher import cli, front, member, supervise

HERE = Path(__file__).resolve().parent
front.FRONT = [str(HERE / "fake_front.py")]
member.RANK = [str(HERE / "fake_rank.py")]
supervise.MEMBER = [__file__, "member"]

if __name__ == "__main__":
    sys.exit(member.main() if sys.argv[1:] == ["member"] else cli.main())
