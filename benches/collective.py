#!/usr/bin/env python3
"""What a collective's step costs beside a step of one process: two workers on loopback with a thread each, and one process with two
towers of a thread each, in turns; the tutorial's network, synthetic pictures, the same examples per update.

usage: collective.py TFTRAIN [--rounds N] [--steps N] [--batch N]

A turn's figure is the median of `sec_per_batch` over its steps, without the first ten.
"""
import argparse, json, os, socket, statistics, subprocess, tempfile


def config(folder, args, name, cluster, **settings):
    path = os.path.join(folder, f"{name}.yaml")
    # JSON is YAML.
    run = {
        "model": "cifar10",
        "data": {"name": "synthetic", "examples": 5000, "batch_size": args.batch},
        "towers": {"cpus": 1 if cluster else 2},
        "train": {"dir": os.path.join(folder, name), "max_steps": args.steps, "log_every": 1, "summary_every": 0},
    }
    with open(path, "w") as file:
        json.dump(run | settings | ({"cluster": cluster} if cluster else {}), file)
    return path, run["train"]["dir"]


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def turn(args, folder, name, cluster, **settings):
    """The median seconds of a step."""
    path, train_dir = config(folder, args, name, cluster, **settings)
    command = [args.tftrain] + (["launch"] if cluster else []) + ["--config", path]
    threads = [] if cluster else ["--threads", "2"]
    done = subprocess.run(command + threads, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    with open(os.path.join(train_dir, "metrics.jsonl")) as lines:
        rows = [json.loads(line) for line in lines]
    return statistics.median(row["sec_per_batch"] for row in rows if row["kind"] == "step" and row["step"] >= 10)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tftrain")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128, help="examples per tower")
    args = parser.parse_args()
    args.tftrain = os.path.abspath(args.tftrain)
    ratios = []
    for i in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            workers = [f"127.0.0.1:{port}" for port in free_ports(2)]
            ways = {"one process": None, "collective": {"worker": workers, "mode": "collective"}}
            names = list(ways) if i % 2 else list(reversed(ways))
            ms = {name: 1000 * turn(args, folder, name.replace(" ", "-"), ways[name]) for name in names}
        ratios.append(ms["collective"] / ms["one process"])
        print(f"{ms['one process']:7.1f} ms in one process {ms['collective']:7.1f} ms in two {ratios[-1]:6.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f} [{min(ratios):.3f} {max(ratios):.3f}]")


if __name__ == "__main__":
    main()
