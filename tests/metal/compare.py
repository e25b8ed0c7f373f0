"""Serves random requests on `mps`, as the stand-in computes it, and by the same references on the CPU.

`python compare.py MODEL OPTIONS`, options as JSON; prints the device's weights and whether all requests got the same.
"""

import json
import random
import sys
from pathlib import Path

import sitecustomize

sitecustomize.install()

import torch  # noqa: E402
from phalanx.comm import mesh, threads  # noqa: E402
from phalanx.comm.broadcast import ThreadPlanBroadcast  # noqa: E402
from phalanx.comm.watchdog import LocalWatchdog  # noqa: E402
from phalanx.kernels.cpp import ops  # noqa: E402
from phalanx.rank import protocol  # noqa: E402
from phalanx.rank.options import Options  # noqa: E402
from phalanx.rank.scheduler.grammar import Grammars  # noqa: E402
from phalanx.rank.server.text.load import Text  # noqa: E402
from phalanx.rank.worker.engine import Engine, RankContext  # noqa: E402
from phalanx.rank.worker.executor import LocalExecutor  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.rank import speculating  # noqa: E402

REQUESTS = 16


def served(device: str, model: str, options: dict) -> tuple[dict[str, list[int] | None], list[str]]:
    """The tokens of each request, and the dtypes and devices of the model's matrices and buffers."""
    tokens, kinds = {}, set()
    grammars = Grammars()
    grammars.know(Text(model).vocabulary(speculating.VOCAB))
    draw = random.Random(0)
    texts = [speculating.random_request(draw, i) for i in range(REQUESTS)]

    def rank(world):
        torch.set_grad_enabled(False)
        place = RankContext(world, ["here"], mesh.build(world, 1, 1), torch.device(device), LocalWatchdog(0))
        sizes = {"max_num_seqs": 6, "max_model_len": speculating.MAX_LEN, "mem": 4, "block_size": 4}
        engine = Engine(Options(model=model, **{"dtype": "f32", "speculate": "ngram", **sizes, **options}), place)
        limits = engine.load()
        weights = [*engine.model.parameters(), *engine.model.buffers()]
        kinds.update(f"{x.device.type} {x.dtype}" for x in weights if x.dim() > 1)
        executor = LocalExecutor(ThreadPlanBroadcast(world), engine.runner)
        server = speculating.Server(limits, executor, 1)
        speculating.serve(server, texts, grammars, 0)
        tokens.update({name: one.get("tokens") for name, one in server.results.items()})
        executor.start(protocol.Plan(step=-1, stop=0))
        engine.unload()

    threads.run(rank, 1)
    return tokens, sorted(kinds)


if __name__ == "__main__":
    ops.available = lambda: False  # else the CPU would not use the references
    chosen = sys.argv[1], json.loads(sys.argv[2])
    (metal, kinds), (here, _) = served("mps", *chosen), served("cpu", *chosen)
    print(json.dumps({"kinds": kinds, "requests": len(metal), "tokens": sum(len(one or ()) for one in metal.values()),
                      "different": [name for name in here if here[name] != metal.get(name)]}))  # fmt: skip
