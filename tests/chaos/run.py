#!/usr/bin/env python3
"""Strikes one task of a cluster at a random moment, in every mode, and counts how all of them end.

    tests/chaos/run.py target/debug/tftrain 3 KILL TERM INT INT2 STOP

Seeds are fixed. Where the mode lets the others go on, they must, and are ended by a SIGTERM to a living worker.
Prints a line for each outcome and how often it came, and details of any that nobody promised.
"""
import collections
import glob
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time

MODES = {
    "ps-sync, 1 ps": (1, 2, "ps-sync"),
    "ps-sync, 2 ps": (2, 2, "ps-sync"),
    "ps-async": (1, 2, "ps-async"),
    "collective of 2": (0, 2, "collective"),
    "collective of 3": (0, 3, "collective"),
}
# Longer than the rendezvous timeout below.
PATIENCE = 14


def cluster(folder, ps, workers, mode):
    sockets = [socket.socket() for _ in range(ps + workers)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    hosts = [f'"127.0.0.1:{one.getsockname()[1]}"' for one in sockets]
    text = "model: line\ndata: {name: line}\ncluster:\n"
    text += f"  ps: [{', '.join(hosts[:ps])}]\n" if ps else ""
    text += f"  worker: [{', '.join(hosts[ps:])}]\n  mode: {mode}\n"
    with open(f"{folder}/cluster.yaml", "w") as file:
        file.write(text)


class Task:
    def __init__(self, program, folder, job, index):
        self.name = f"{job}:{index}"
        self.errors = open(f"{folder}/{self.name}.err", "w+")
        command = f"{program} train --config cluster.yaml --job-name {job} --task-index {index}"
        command += " --max-steps 100000000 --rendezvous-timeout 8 --summary-every 0"
        if self.name == "worker:0":
            command += " --train-dir run --log-every 20 --save-steps 500"
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command.split(), cwd=folder, stdin=null, stdout=null, stderr=self.errors
        )

    def lives(self):
        return self.process.poll() is None

    def send(self, number):
        if self.lives():
            self.process.send_signal(number)

    def end(self):
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return "HUNG"


def faults(program, folder):
    """Steps that go backwards, and checkpoints that cannot be read."""
    found, last = [], -1
    metrics = f"{folder}/run/metrics.jsonl"
    for line in open(metrics) if os.path.exists(metrics) else []:
        row = json.loads(line) if line.endswith("\n") else {}
        if row.get("kind") == "step":
            if row["step"] < last:
                found.append(f"step {row['step']} after {last}")
            last = row["step"]
    for path in glob.glob(f"{folder}/run/model.ckpt-*.safetensors"):
        read = subprocess.run([program, "inspect", "checkpoint", path], capture_output=True)
        if read.returncode:
            found.append(read.stderr.decode()[-200:])
    return found


def strike(program, folder, mode, role, blow, moments):
    ps, workers, _ = MODES[mode]
    tasks = [Task(program, folder, "ps", i) for i in range(ps)]
    tasks += [Task(program, folder, "worker", i) for i in range(workers)]
    target = {"ps": tasks[0], "chief": tasks[ps], "worker": tasks[-1]}[role]
    others = [task for task in tasks if task is not target]
    time.sleep(moments.choice([moments.uniform(0, 0.25), moments.uniform(0.25, 1.2)]))
    target.send(getattr(signal, "SIG" + blow.removesuffix("2")))
    if blow == "INT2":
        time.sleep(moments.uniform(0, 0.03))
        target.send(signal.SIGINT)
    words, codes = "", {}
    if ps and role != "ps" and blow in ("KILL", "STOP", "INT2"):
        # What the last word of a worker was decides whether the others go on.
        time.sleep(6 if blow == "STOP" else 1)
        target.send(signal.SIGCONT)
        codes[target.name] = target.end()
        words = "others go on" if all(task.lives() for task in others) else "others end"
        next(task for task in others if task.name.startswith("worker")).send(signal.SIGTERM)
    elif blow == "STOP":
        codes = {task.name: task.end() for task in others}
        target.send(signal.SIGCONT)
    for task in tasks:
        if task.name not in codes:
            codes[task.name] = task.end()
    return words, " ".join(f"{name}={codes[name]}" for name in sorted(codes)), tasks


def main():
    program, rounds, blows = os.path.abspath(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    moments, outcomes = random.Random(7), collections.Counter()
    for _ in range(rounds):
        for mode, (ps, workers, name) in MODES.items():
            for role in ["ps"] * bool(ps) + ["chief", "worker"]:
                for blow in blows:
                    with tempfile.TemporaryDirectory() as folder:
                        cluster(folder, ps, workers, name)
                        words, codes, tasks = strike(program, folder, mode, role, blow, moments)
                        found = faults(program, folder)
                        outcomes[mode, role, blow, words, codes] += 1
                        if found or any(bad in codes for bad in ("HUNG", "=1 ", "=101", "=141")):
                            print("!!", mode, role, blow, words, codes, found)
                            for task in tasks:
                                task.errors.seek(0)
                                print("  ", task.name, task.errors.read()[-500:])
    for outcome, times in sorted(outcomes.items()):
        print(times, *outcome, sep=" | ")


main()
