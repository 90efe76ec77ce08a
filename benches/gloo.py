#!/usr/bin/env python3
"""All-reduce between two processes on loopback: `tftrain bench reduce` beside gloo, in turns.

usage: gloo.py TFTRAIN [--rounds N] [--ranks N] [--pin] [tftrain's flags ...]

Each round runs gloo in fresh processes, then tftrain in fresh processes. GB/s are bytes of the gradient by the time of one
exchange on rank 0, after a barrier; a round's figure is the median of its exchanges. gloo adds up, tftrain takes the mean.
--pin binds each rank of either to a core of its own. Needs PyTorch.
"""
import argparse, json, os, statistics, subprocess, sys, time

SIZES = [64 << 10, 1 << 20, 4_300_000, 64 << 20]


def times_of(size):
    return min(max((64 << 20) // size, 5), 100)


def gloo_rank(rank, ranks, port, pin, queue):
    import torch, torch.distributed as dist
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    medians = []
    for size in SIZES:
        gradient = torch.zeros(size // 4)
        dist.all_reduce(gradient)
        seconds = []
        for _ in range(times_of(size)):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(gradient)
            seconds.append(time.perf_counter() - start)
        medians.append(size / statistics.median(seconds) / 1e9)
    if rank == 0:
        queue.put(medians)
    dist.barrier()
    dist.destroy_process_group()


def gloo(ranks, port, pin):
    import torch.multiprocessing as mp
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    world = [context.Process(target=gloo_rank, args=(r, ranks, port, pin, queue)) for r in range(ranks)]
    for process in world:
        process.start()
    medians = queue.get()
    for process in world:
        process.join()
    return medians


def bind(process, core):
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), {core})


def tftrain(program, ranks, pin, flags):
    command = [program, "bench", "reduce", "--json", "--rounds", "1", "--ranks", str(ranks)]
    command += ["--sizes", ",".join(map(str, SIZES)), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    if pin:
        # Rank 0 starts the others; threads take over what their starter is bound to.
        cores, others = sorted(os.sched_getaffinity(0)), []
        while len(others) < ranks - 1:
            bind(process.pid, cores[0])
            others = open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()
        for rank, other in enumerate(others, 1):
            bind(other, cores[rank % len(cores)])
    result = json.loads(process.communicate()[0])
    return [size["gb_per_sec"] for size in result["sizes"]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pin", action="store_true")
    args, flags = parser.parse_known_args()
    peers, ours = [], []
    for number in range(args.rounds):
        peers.append(gloo(args.ranks, 29_600 + number, args.pin))
        ours.append(tftrain(args.program, args.ranks, args.pin, flags))
    print(f"{'bytes':>10}  {'gloo GB/s':>22}  {'tftrain GB/s':>22}  {'tftrain / gloo':>22}")
    for i, size in enumerate(SIZES):
        def cell(values):
            return f"{statistics.median(values):.2f} [{min(values):.2f} {max(values):.2f}]"
        a, b = [r[i] for r in peers], [r[i] for r in ours]
        ratios = [y / x for x, y in zip(a, b)]
        print(f"{size:>10}  {cell(a):>22}  {cell(b):>22}  {cell(ratios):>22}")


if __name__ == "__main__":
    main()
