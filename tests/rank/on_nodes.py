"""A rank's bootstrap on a machine whose NUMA nodes are written down as files, in the folder that NODES names."""

import os
import sys
from pathlib import Path

from phalanx.launcher.job import binding, rank_bootstrap

binding.SYS = Path(os.environ["NODES"])
sys.exit(rank_bootstrap.main())
