#!/usr/bin/env python3
"""Two hosts with a slow link between them: what the wire format and the overlap are worth.

    tests/network/run.py target/release/tftrain [--mbit 100] [--rounds 3] [--batch 512]

Needs root, `ip` and `tc`: the hosts are network namespaces, joined by a pair of virtual devices that let through so many
Mbit/s each way. A collective of two workers trains the tutorial network on them, in all four ways, one after the other and
again. Prints medians of the seconds of a step and of what the reducer waits after the gradients are done, and ends with 1
when bf16 does not halve the wait (at most 0.6 of it) or the overlap hides less than half of what it could: of the time
that the finished gradients need on the link, or of the time that is left of the backward pass, whichever is less.
"""
import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile

NAMES = [f"tftrain-{os.getpid()}-{i}" for i in (0, 1)]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
WAYS = [("f32", False), ("f32", True), ("bf16", False), ("bf16", True)]


def sh(*command):
    subprocess.run(command, check=True)


def connect(mbit):
    devices = [f"tf{os.getpid() % 10000}{i}" for i in (0, 1)]
    sh("ip", "link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
    for name, device, address in zip(NAMES, devices, ADDRESSES):
        sh("ip", "netns", "add", name)
        sh("ip", "link", "set", device, "netns", name)
        inside = ["ip", "netns", "exec", name]
        sh(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
        sh(*inside, "ip", "link", "set", "lo", "up")
        sh(*inside, "ip", "link", "set", device, "up")
        rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "50ms"]
        sh(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)


def disconnect():
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def train(program, folder, wire, overlap, batch, steps):
    hosts = ",".join(f"{address}:2222" for address in ADDRESSES)
    flags = ["cifar10", "--synthetic", "--set", "data.examples=5000", "--worker-hosts", hosts]
    flags += ["--job-name", "worker", "--threads", "1", "--batch-size", str(batch)]
    flags += ["--max-steps", str(steps), "--log-every", "1", "--summary-every", "0"]
    flags += ["--set", "cluster.mode=collective", "--set", f"cluster.wire={wire}"]
    flags += ["--set", f"cluster.overlap={str(overlap).lower()}", "--train-dir", "run", "--overwrite"]
    flags += ["--trace-steps", str(steps)]
    environment = dict(os.environ, TFTRAIN_TOKEN="measuring")
    tasks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, program, *flags, "--task-index", str(i)],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )
        for i, name in enumerate(NAMES)
    ]
    try:
        codes = [task.wait(300) for task in tasks]
    finally:
        for task in tasks:
            if task.poll() is None:
                task.send_signal(signal.SIGKILL)
                task.wait()
    assert codes == [0, 0], codes
    rows = [json.loads(line) for line in open(f"{folder}/run/metrics.jsonl")]
    rows = [row for row in rows if row["kind"] == "step"][2:]
    trace = json.load(open(f"{folder}/run/trace.json"))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    spans = [e for e in trace if e["ph"] == "X"]
    # How long the gradients that are exchanged early are on their way, and how much of that lies within the towers' work.
    early = [e for e in spans if lanes[e["tid"]] == "exchange"]
    towers = [e for e in spans if lanes[e["tid"]] == "tower_0" and e["name"] == "gradients"]
    hidden = [
        sum(max(0, min(a["ts"] + a["dur"], b["ts"] + b["dur"]) - max(a["ts"], b["ts"])) for b in towers)
        for a in early
    ]
    left = [
        max((b["ts"] + b["dur"] - a["ts"] for b in towers if b["ts"] <= a["ts"]), default=0) for a in early
    ]
    middle = lambda values: statistics.median(values) if values else 0.0
    return {
        "step": middle([r["sec_per_batch"] for r in rows]),
        "compute": middle([r["compute_sec"] for r in rows]),
        "reduce": middle([r["reduce_sec"] for r in rows]),
        "exchange": middle([e["dur"] / 1e6 for e in early]),
        "hidden": middle(hidden) / 1e6,
        "left": middle(left) / 1e6,
    }


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("program")
    arguments.add_argument("--mbit", type=int, default=100)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--batch", type=int, default=512)
    arguments.add_argument("--steps", type=int, default=12)
    asked = arguments.parse_args()
    program = os.path.abspath(asked.program)
    found = {way: [] for way in WAYS}
    try:
        connect(asked.mbit)
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(asked.rounds):
                for way in WAYS:
                    found[way].append(train(program, folder, *way, asked.batch, asked.steps))
    finally:
        disconnect()
    middle = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for way, runs in found.items()
    }
    print(f"{asked.mbit} Mbit/s, batch {asked.batch} per worker, medians of {asked.rounds} rounds, seconds")
    print("| wire | overlap | step | towers | reducer waits | early exchange | of it hidden |")
    print("|---|---|---|---|---|---|---|")
    for (wire, overlap), m in middle.items():
        cells = [f"{m[key]:.3f}" for key in ("step", "compute", "reduce", "exchange", "hidden")]
        print(f"| {wire} | {'on' if overlap else 'off'} | {' | '.join(cells)} |")
    halved = middle["bf16", False]["reduce"] / middle["f32", False]["reduce"]
    print(f"bf16 waits {halved:.2f} of what f32 does")
    good = halved <= 0.6
    for wire in ("f32", "bf16"):
        m = middle[wire, True]
        share = m["hidden"] / max(1e-9, min(m["exchange"], m["left"]))
        print(f"{wire}: {share:.2f} of what can be hidden is hidden")
        good &= share >= 0.5
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
