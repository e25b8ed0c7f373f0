"""Ranks that serve one model after the other in one job: MODELS names their directories, a colon between.

After each one rank 0 prints the tokens of a greedy prompt, and every rank the memory that it holds once it is unloaded,
and how many objects the garbage collector passes over, before and after, and how many it looks at before.
On GPUs each rank takes the one of its number on this host.
"""

import gc
import json
import os
import sys

import msgspec
import psutil
import torch
from phalanx.rank import __main__ as main
from phalanx.rank import protocol

PROMPT = [3, 14, 15, 92, 65, 35]


def held(device):
    """Bytes: of the GPU what torch has taken, of the host what this process has in memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return psutil.Process().memory_info().rss


class ReloadingRank(main.Rank):
    def __init__(self, job, *rest):
        if job.options.device == "cuda":
            job = msgspec.structs.replace(job, device_index=int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)))
        super().__init__(job, *rest)

    def connect(self): ...

    def serve(self, engine, lines):
        for directory in os.environ["MODELS"].split(":"):
            engine.options = msgspec.structs.replace(self.options, model=directory)
            code = super().serve(engine, lines)
            loaded, frozen, looked_at = held(engine.place.device), gc.get_freeze_count(), len(gc.get_objects())
            engine.unload()
            line = dict(rank=self.world.rank, loaded=loaded, held=held(engine.place.device))
            line |= dict(frozen=[frozen, gc.get_freeze_count()], looked_at=looked_at)
            print(json.dumps(line), file=sys.stderr, flush=True)
        return code

    def run_scheduler(self, replicas, model):
        (replica,) = replicas
        tokens = []
        request = protocol.SamplingParams(max_tokens=20, temperature=0.0)
        replica.scheduler.add(protocol.Request("one", protocol.pack_u32(PROMPT), request))
        while not replica.idle:
            if not replica.plan():
                replica.wait_with_progress()
                for delta in replica.finish():
                    tokens += delta.tokens
        print(json.dumps(dict(tokens=tokens)), file=sys.stderr, flush=True)
        replica.executor.start(protocol.Plan(step=-1, stop=0))
        return 0


if __name__ == "__main__":
    os._exit(main.main(ReloadingRank))
