"""The tutorial network in PyTorch's DistributedDataParallel: two processes of a thread and a core each, gloo on loopback.

usage: ddp_worker.py 1 BATCH DTYPE WARMUP STEPS, batch per process; prints the median milliseconds of a step of both as JSON.
"""
import itertools
import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import multiprocessing, nn

import worker
from torch_worker import Network

PROCESSES = 2


def rank_of(rank, meeting, batch, dtype, warmup, steps):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=PROCESSES)
    network = Network("banded").to(memory_format=torch.channels_last)
    # All begin with the same values, and the only buffer is a constant.
    parallel = nn.parallel.DistributedDataParallel(
        network, init_sync=False, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    trained = list(network.parameters())
    averages = [variable.detach().clone() for variable in trained]
    batches = [
        (torch.from_numpy(pictures).permute(0, 3, 1, 2), torch.from_numpy(labels).long())
        for pictures, labels in worker.batches(batch)
    ]
    source = itertools.cycle(batches)
    global_step = itertools.count(1)

    def step():
        pictures, labels = next(source)
        parallel.zero_grad(set_to_none=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = parallel(pictures)
        decay = network.local3.weight.square().sum() + network.local4.weight.square().sum()
        loss = F.cross_entropy(logits.float(), labels) + worker.WEIGHT_DECAY / 2 * decay
        loss.backward()
        n = next(global_step)
        with torch.no_grad():
            torch._foreach_add_(trained, [variable.grad for variable in trained], alpha=-worker.LEARNING_RATE)
            torch._foreach_lerp_(averages, trained, 1 - min(worker.EMA_DECAY, (1 + n) / (10 + n)))
        return loss.item()

    answer = worker.timed(step, warmup, steps)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"ms": answer["ms"], "loss": answer["losses"][-1]}))
    sys.stdout.flush()
    # Who takes its connections down while the other still uses gloo makes it abort: now and then `destroy_process_group` does.
    time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    batch, dtype, warmup, steps = int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_of, (os.path.join(folder, "meeting"), batch, dtype, warmup, steps), PROCESSES)
