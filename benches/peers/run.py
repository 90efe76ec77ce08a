#!/usr/bin/env python3
"""tftrain beside TensorFlow, PyTorch and JAX: whole training steps of the CIFAR-10 tutorial network on the CPU, in turns.

Installs the peers (requirements.txt) into a virtual environment, sees that all compute the same network, then lets each
take its turn in every round, in a new order each time. Each runs on as many cores as it has threads, and is bound to them.

A step of tftrain is that of `tftrain bench step`: its input (drawing, distorting and shuffling pictures) included. The
peers' pictures lie in memory. The peers get settings of glibc's malloc that make them faster; tftrain gets none. The
figure of a turn is its median step. A turn during which other processes used the CPU is repeated, and the quietest kept.
"""
import argparse
import dataclasses
import json
import math
import os
import random
import re
import statistics
import sys

from turns import (
    MALLOC,
    TOLERANCE,
    WARMUP,
    Failed,
    Tftrain,
    Variant,
    Worker,
    check,
    common_parser,
    install,
    machine,
    machine_line,
    parsed,
    positive,
    quietest,
    ratio_of,
    say,
)

CHECKED_STEPS = 3

LRNS = ["as written", "banded", "none"]
PEERS = {
    "TensorFlow": {"session": LRNS},
    "PyTorch": {"eager": LRNS, "compiled": ["as written", "banded"]},
    "JAX": {"jit": LRNS},
}


def measured(subject, variant, args):
    """The examples/s of a turn."""

    def turn():
        answer = subject.turn(variant, args.batch, WARMUP, args.steps)
        if not math.isfinite(answer["losses"][-1]):
            raise Failed("diverged")
        return {"examples_per_sec": args.batch / answer["ms"] * 1e3}

    return quietest(turn, subject.cpu_seconds, args)


def table(threads, dtype, turns):
    """Markdown of one thread count and format; `turns` holds each variant's turns, a round each."""
    speeds = {v: [t["examples_per_sec"] for t in ts] for v, ts in turns.items()}
    medians = {v: statistics.median(s) for v, s in speeds.items()}
    ours = next((v for v in speeds if v.is_ours()), None)
    peers = [v for v in speeds if not v.is_ours() and v.is_same_network()]
    best = max(peers, key=medians.get, default=None)
    lines = [
        f"| {threads} thread{'s' if threads > 1 else ''}, {dtype} | examples/s | least to most | tftrain is | foreign cores |",
        "|---|---|---|---|---|",
    ]
    for variant in sorted(speeds, key=medians.get, reverse=True):
        ratio = ratio_of(speeds, ours, variant) if variant in peers and ours else ""
        name = f"**{variant}**" if variant in (best, ours) else str(variant)
        least, most = min(speeds[variant]), max(speeds[variant])
        foreign = max(turn["foreign_cores"] for turn in turns[variant])
        lines.append(f"| {name} | {medians[variant]:,.0f} | {least:,.0f} to {most:,.0f} | {ratio} | {foreign:.2f} |")
    if ours and best:
        lines += ["", f"tftrain beside the fastest peer, {best}: {ratio_of(speeds, ours, best)}"]
    return "\n".join(lines)


def arguments():
    parser = common_parser(__doc__)
    parser.add_argument("--threads", type=lambda text: [positive(t) for t in text.split(",")], default=[2, 1], help="2,1")
    parser.add_argument("--dtypes", type=dtypes, default=["f32", "bf16"], help="f32,bf16")
    parser.add_argument("--batch", type=positive, default=128)
    parser.add_argument("--only", type=pattern, default="", metavar="REGEX", help="rows whose name has it; tftrain always")
    args = parsed(parser)
    if max(args.threads) > len(os.sched_getaffinity(0)):
        parser.error(f"--threads: this machine lets us use {len(os.sched_getaffinity(0))} cores")
    return args


def pattern(text):
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def dtypes(text):
    if unknown := set(text.split(",")) - set(TOLERANCE):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(TOLERANCE)}")
    return text.split(",")


def variants(args):
    for threads in args.threads:
        for dtype in args.dtypes:
            yield Variant("tftrain", "", "as written", dtype, threads)
            for framework, modes in PEERS.items():
                for mode, lrns in modes.items():
                    rows = [Variant(framework, mode, lrn, dtype, threads) for lrn in lrns]
                    yield from (row for row in rows if re.search(args.only, str(row)))


class Bench:
    """All subjects, and what they have shown."""

    def __init__(self, args):
        self.args = args
        self.tftrain = Tftrain(args.program)
        self.python = install(args.venv)
        self.workers = {}
        self.left_out = {}
        self.turns = {}

    def subject(self, variant):
        if variant.is_ours():
            return self.tftrain
        key = (variant.framework, variant.threads)
        if key not in self.workers:
            self.workers[key] = Worker(self.python, *key)
        return self.workers[key]

    def leave_out(self, variant, error):
        self.left_out[variant] = str(error)
        self.turns.pop(variant, None)
        say(f"LEFT OUT: {variant}, {variant.dtype}, {variant.threads} threads: {error}")

    def check(self):
        """Builds all variants; those that cannot run are left out."""
        answers = {}
        for variant in variants(self.args):
            try:
                steps = 1 if variant.is_ours() else CHECKED_STEPS
                answers[variant] = self.subject(variant).turn(variant, self.args.batch, 0, steps)
            except Failed as error:
                self.leave_out(variant, error)
        for same in (True, False):
            if some := {v: a for v, a in answers.items() if v.is_same_network() is same}:
                check(some)
                say(f"{len(some)} variants, {'with' if same else 'without'} LRN, compute the same")
        if not any(variant.is_ours() for variant in answers):
            raise Failed("tftrain runs none of this, so there is nothing to compare")
        if all(variant.is_ours() for variant in answers):
            raise Failed("no peer runs, so there is nothing to compare")
        self.turns = {variant: [] for variant in answers}

    def round(self, number):
        order = list(self.turns)
        random.Random(number).shuffle(order)
        for variant in order:
            try:
                turn = measured(self.subject(variant), variant, self.args)
            except Failed as error:
                self.leave_out(variant, error)
                continue
            self.turns[variant].append(turn)
            say(
                f"round {number}, {variant.threads} threads, {variant.dtype}, {variant}: {turn['examples_per_sec']:,.0f} "
                f"examples/s, foreign cores {turn['foreign_cores']:.2f}, tries {turn['tries']}"
            )

    def versions(self):
        return [self.tftrain.version, *dict.fromkeys(worker.version for worker in self.workers.values())]

    def print(self):
        print(machine_line())
        print(f"{', '.join(self.versions())}; batch {self.args.batch}, {self.args.rounds} rounds\n")
        for threads in self.args.threads:
            for dtype in self.args.dtypes:
                rows = {v: t for v, t in self.turns.items() if (v.threads, v.dtype) == (threads, dtype)}
                print(table(threads, dtype, rows), end="\n\n")
        for variant, why in self.left_out.items():
            print(f"Left out: {variant}, {variant.dtype}, {variant.threads} threads: {why}")
        busy = sum(t["foreign_cores"] > self.args.max_foreign for ts in self.turns.values() for t in ts)
        if busy:
            total = sum(map(len, self.turns.values()))
            print(f"NOT QUIET: in {busy} of {total} turns others used more than {self.args.max_foreign} cores.")

    def write(self, file):
        results = {
            "machine": machine(),
            "versions": self.versions(),
            "settings": {k: getattr(self.args, k) for k in ("batch", "rounds", "steps", "max_foreign")},
            "malloc_of_peers": MALLOC,
            "variants": [dataclasses.asdict(v) | {"turns": turns} for v, turns in self.turns.items()],
            "left_out": [dataclasses.asdict(v) | {"why": why} for v, why in self.left_out.items()],
        }
        file.write_text(json.dumps(results, indent=1) + "\n")

    def end(self):
        for worker in self.workers.values():
            worker.end()


def main():
    args = arguments()
    bench = None
    try:
        bench = Bench(args)
        bench.check()
        for number in range(1, args.rounds + 1):
            bench.round(number)
        bench.print()
        if args.json:
            bench.write(args.json)
    except (Failed, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if bench:
            bench.end()


if __name__ == "__main__":
    main()
