#!/usr/bin/env python3
"""Memory of a parameter server of ps-sync: at most (4 + workers) times the model, and flat over 10,000 rounds.

    tests/chaos/memory.py target/release/tftrain

The bound is that of the tutorial's network with a picture per step, over what the server of a model of two numbers has; flatness
is that of the small model. Ends with 1 where either fails.
"""
import os
import sys
import time

from cluster import PATIENCE, Cluster

# A small rate: with a picture a step the tutorial's own lets the loss jump about, which looks like training anew.
PICTURES = "model: cifar10\ndata: {name: cifar10, batch_size: 1}\noptimizer: {name: sgd, learning_rate: 0.01}\n"
# KiB of the tutorial's 1,068,298 variables.
MODEL = 1_068_298 * 4 / 1024
# KiB by which a heap may move without growing.
PLAY = 256


def most(cluster, step):
    """The most memory of the parameter server until that step, in KiB."""
    found, last, moved = 0, -1, time.monotonic()
    while last < step:
        found = max(found, cluster.ps[0].memory())
        now = (cluster.steps() or [-1])[-1]
        last, moved = now, time.monotonic() if now != last else moved
        if time.monotonic() > moved + PATIENCE or not all(task.lives() for task in cluster.tasks):
            sys.exit(f"no step after {last}: {[words for task in cluster.tasks for _, words in task.words]}")
        time.sleep(0.05)
    return found


def close(cluster):
    cluster.chief.send("TERM")
    codes = {task.end(time.monotonic() + PATIENCE) for task in cluster.tasks}
    found = cluster.faults()
    cluster.close()
    if codes != {143} or found:
        sys.exit(f"ended with {codes}, {found}")


def main():
    program = os.path.abspath(sys.argv[1])
    cluster = Cluster(program, "ps-sync", 1, 2, flags="--save-steps 1000")
    early, late = most(cluster, 1000), most(cluster, 11_000)
    close(cluster)
    good = late <= early + PLAY
    print(f"small model, 2 workers: {early} KiB in 1,000 rounds, {late} KiB in 10,000 more")
    for workers in (2, 4):
        flags = "--synthetic --threads 1 --save-steps 100"
        cluster = Cluster(program, "ps-sync", 1, workers, head=PICTURES, flags=flags)
        models = (most(cluster, 300) - early) / MODEL
        close(cluster)
        good &= models <= 4 + workers
        print(f"tutorial's network, {workers} workers: {models:.1f} times the model, allowed {4 + workers}")
    sys.exit(not good)


if __name__ == "__main__":
    main()
