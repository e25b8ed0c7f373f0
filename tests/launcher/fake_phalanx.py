"""The `phalanx` command with fake ranks and a fake server; as `fake_phalanx.py member`, the small per-rank process.

PEER_PATIENCE stands in for the supervisor's. Restarts do not wait.
"""

import os
import sys
from pathlib import Path

from phalanx.launcher import cli
from phalanx.launcher.job import rank_bootstrap, server_process, supervisor

HERE = Path(__file__).resolve().parent
server_process.SERVER = [str(HERE / "fake_server.py")]
rank_bootstrap.RANK = [str(HERE / "fake_rank.py")]
supervisor.BOOTSTRAP = [__file__, "member"]
supervisor.RESTART_DELAY = 0.1
supervisor.PEER_PATIENCE = float(os.environ.get("PEER_PATIENCE", supervisor.PEER_PATIENCE))

if __name__ == "__main__":
    sys.exit(rank_bootstrap.main() if sys.argv[1:] == ["member"] else cli.main())
