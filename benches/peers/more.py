#!/usr/bin/env python3
"""What run.py does not measure of tftrain on the CPU, row by row, each with the target it was built for: networks without LRN,
towers, processes, input, the line, memory, AVX2, threads. As in run.py all that a row compares take turns in every round, in a new
order each time, and a turn during which other processes used the CPU is repeated.

Where nothing else is said a figure is that of median steps at batch 128 on two threads bound to two cores, and the peers have
LRN banded and the settings of malloc that make them fast.
"""
import argparse
import dataclasses
import functools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from turns import (
    HERE,
    MALLOC,
    WARMUP,
    Failed,
    Tftrain,
    Variant,
    Worker,
    bound,
    check,
    common_parser,
    ended_seconds,
    environment,
    install,
    last_line,
    machine,
    machine_line,
    output,
    parsed,
    quietest,
    ratio_of,
    say,
)

sys.path.append(str(HERE.parent))
import collective  # noqa: E402

THREADS = 2
BATCH = 128
# Which way of each peer is its fastest.
FASTEST = {"TensorFlow": "session", "PyTorch": "eager", "JAX": "jit"}
# What keeps a peer to AVX2, as far as it can be kept: Eigen, a part of TensorFlow and of JAX, has no such setting.
AVX2 = {
    "TensorFlow": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "PyTorch": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "JAX": {"XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
}
PIPELINES = {
    "TensorFlow, tf.data by pictures": "tf.data-pictures",
    "TensorFlow, tf.data by batches": "tf.data-batches",
    "PyTorch, batches in the calling process": "torch-batches",
    "PyTorch, the same compiled": "torch-compiled",
    "PyTorch, DataLoader with 2 workers": "torch-loader",
}


@dataclasses.dataclass
class Contestant:
    """What takes turns, and the CPU time it has had."""

    name: str
    turn: callable
    cpu_seconds: callable = ended_seconds


@dataclasses.dataclass
class Row:
    """Ours beside the best of the others: the ratio must be at least `target`, or below it where least is best."""

    title: str
    unit: str
    target: float
    ours: Contestant
    others: list
    least_is_best: bool = False

    def ratio(self, figures):
        """The best of the others, our ratio to it as words, and whether the target is met."""
        medians = {name: statistics.median(values) for name, values in figures.items() if name != self.ours.name}
        best = (min if self.least_is_best else max)(medians, key=medians.get)
        words = ratio_of(figures, self.ours.name, best)
        ratio = float(words.split()[0])
        return best, words, ratio < self.target if self.least_is_best else ratio >= self.target

    def target_words(self):
        return f"{'below' if self.least_is_best else 'at least'} {self.target:g} x"


class Rows:
    """How each row is made; a method per row of `ROWS`."""

    def __init__(self, args):
        self.args = args
        self.tftrain = Tftrain(args.program)
        self.python = install(args.venv)
        self.workers = []

    def counted(self, *flags):
        return ["--num-warmup-batches", str(WARMUP), "--num-batches", str(self.args.steps), *flags]

    def step(self, *flags, figure=lambda result: result["global_batch"] / result["median"]["step_ms"] * 1e3, **process):
        """A turn of `bench step`: examples/s, unless it is another figure."""
        return lambda: figure(self.tftrain.bench("step", *self.counted(*flags), **process))

    def script(self, name, threads, *arguments):
        """What a peer's script answers."""
        command = [self.python, HERE / name, str(threads), *map(str, arguments)]
        return json.loads(last_line(output(command, env=environment(threads, MALLOC))))

    def worker(self, framework, settings):
        self.workers.append(Worker(self.python, framework, THREADS, settings))
        return self.workers[-1]

    def peers(self, lrn, dtype, masks):
        """The fastest way of each peer, once all have computed the same first losses."""
        answers, contestants = {}, []
        for framework, mode in FASTEST.items():
            variant = Variant(framework, mode, lrn, dtype, THREADS)
            try:
                worker = self.worker(framework, MALLOC | masks.get(framework, {}))
                answers[variant] = worker.turn(variant, BATCH, 0, 3)
            except Failed as error:
                say(f"LEFT OUT: {variant}, {dtype}: {error}")
                continue
            turn = functools.partial(self.peers_step, worker, variant)
            contestants.append(Contestant(str(variant), turn, worker.cpu_seconds))
        if not answers:
            raise Failed("no peer runs")
        check(answers)
        return contestants

    def peers_step(self, worker, variant):
        answer = worker.turn(variant, BATCH, WARMUP, self.args.steps)
        if not math.isfinite(answer["losses"][-1]):
            raise Failed("diverged")
        return BATCH / answer["ms"] * 1e3

    def beside_peers(self, title, target, *flags, lrn="banded", dtype="f32", masks=None, **process):
        turn = self.step("--threads", str(THREADS), "--set", f"precision={dtype}", *flags, **process)
        turn()  # is refused by programs that have no such setting
        return Row(title, "examples/s", target, Contestant("tftrain", turn), self.peers(lrn, dtype, masks or {}))

    def no_lrn(self, dtype, target):
        return self.beside_peers(f"Without LRN, {dtype}", target, "--set", "model.lrn=false", lrn="none", dtype=dtype)

    def direct(self):
        return self.beside_peers("Direct convolution, f32", 1.5, "--set", "conv=direct")

    def avx2(self):
        env = os.environ | {"TFTRAIN_MAX_CPU_ISA": "avx2"}
        return self.beside_peers("AVX2 alone, f32", 1.0, masks=AVX2, env=env)

    def threads(self):
        one = self.step("--threads", "1", preexec_fn=bound(1))
        others = [Contestant("tftrain, 1 thread", one)]
        two = Contestant("tftrain, 2 threads", self.step("--threads", "2"))
        return Row("2 threads beside 1", "examples/s", 1.9, two, others)

    def towers(self):
        one, two = (
            Contestant(f"tftrain, {words}", self.step("--threads", str(THREADS), "--num-towers", str(count)))
            for count, words in [(1, "1 tower of 2 threads"), (2, "2 towers of 1 thread")]
        )
        return Row("Towers, batch 128 each", "examples/s", 0.95, two, [one])

    def processes(self, dtype, batch):
        def ours():
            args = argparse.Namespace(tftrain=self.args.program, batch=batch, steps=WARMUP + self.args.steps)
            ports = [f"127.0.0.1:{port}" for port in collective.free_ports(2)]
            cluster = {"worker": ports, "mode": "collective"}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    towers = {"cpus": 1, "threads": 1}
                    return 2 * batch / collective.turn(args, folder, "run", cluster, precision=dtype, towers=towers)
                except SystemExit as error:
                    raise Failed(last_line(str(error))) from error

        def peer():
            return 2 * batch / self.script("ddp_worker.py", 1, batch, dtype, WARMUP, self.args.steps)["ms"] * 1e3

        others = [Contestant("PyTorch DistributedDataParallel over gloo", peer)]
        ours = Contestant("tftrain launch, mode: collective", ours)
        return Row(f"2 processes of 1 thread, {dtype}, 2 x {batch}", "examples/s", 2.5, ours, others)

    def input(self):
        folder = [self.args.data_dir] if self.args.data_dir else []
        flags = ["--input-threads", str(THREADS), "--num-batches", "5000", *(["--data-dir", *folder] if folder else [])]

        def ours():
            return self.tftrain.bench("input", *flags)["images_per_sec"]

        def peer(how):
            batches = 100 if how == "tf.data-pictures" else 300
            return self.script("input_worker.py", THREADS, how, 30, batches, *folder)["images_per_sec"]

        others = [Contestant(name, functools.partial(peer, how)) for name, how in PIPELINES.items()]
        return Row("Distorted pictures, 2 threads", "images/s", 10.0, Contestant("tftrain bench input", ours), others)

    def real(self):
        """All steps count here, not the median one: those that wait for input as well."""
        if not self.args.data_dir:
            raise Failed("needs --data-dir with the files of CIFAR-10")
        whole = {"figure": lambda result: result["total_images_per_sec"]}
        flags = ["--threads", "1", "--num-batches", str(5 * self.args.steps)]
        real = self.step(*flags, "--data-dir", self.args.data_dir, preexec_fn=bound(1), **whole)
        ready = self.step(*flags, **whole)
        others = [Contestant("tftrain, drawn pictures, a second core for the input alone", ready)]
        ours = Contestant("tftrain, real pictures, input on the core of the step", real)
        return Row("Real distorted pictures, 1 thread", "examples/s", 0.97, ours, others)

    def line(self):
        steps = 2000
        flags = ["--model", "line", "--batch-size", "1", "--threads", "1", "--num-batches", str(20 * steps)]
        ours = self.step(*flags, figure=lambda result: result["total_images_per_sec"])

        def peer(how):
            answer = self.script("line_worker.py", THREADS, how, 200, steps)
            if not all(math.isclose(*pair, abs_tol=0.2) for pair in zip(answer["line"], [5, 8])):
                raise Failed(f"found the line {answer['line']}")
            return 1e3 / answer["ms"]

        names = {"run": "TensorFlow, session.run with a feed_dict", "callable": "TensorFlow, make_callable"}
        others = [Contestant(name, functools.partial(peer, how)) for how, name in names.items()]
        return Row("Line, one example a step", "steps/s", 10.0, Contestant("tftrain bench step", ours), others)

    def memory(self):
        def ours():
            command = [self.args.program, "bench", "step", "--json", *self.counted("--threads", str(THREADS))]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            most = 0
            while process.poll() is None:
                most = max(most, peak_mebibytes(process.pid))
                time.sleep(0.005)
            if process.returncode != 0:
                raise Failed(f"ended with {process.returncode}")
            return most

        def peer(framework, lrn, settings):
            worker = self.worker(framework, settings)
            try:
                self.peers_step(worker, Variant(framework, FASTEST[framework], lrn, "f32", THREADS))
                return peak_mebibytes(worker.process.pid)
            finally:
                worker.end()

        ways = [(f, lrn, *malloc) for f in FASTEST for lrn in ("as written", "banded") for malloc in (("", {}), (", tuned", MALLOC))]
        others = [
            Contestant(f"{Variant(f, FASTEST[f], lrn, 'f32', 2)}{words}", functools.partial(peer, f, lrn, settings))
            for f, lrn, words, settings in ways
        ]
        ours = Contestant("tftrain", ours)
        return Row("Peak memory of training steps, f32", "MiB", 1.0, ours, others, least_is_best=True)

    def end(self):
        while self.workers:
            self.workers.pop().end()


ROWS = {
    "no-lrn-f32": lambda rows: rows.no_lrn("f32", 2.0),
    "no-lrn-bf16": lambda rows: rows.no_lrn("bf16", 3.0),
    "towers": Rows.towers,
    "ddp-f32": lambda rows: rows.processes("f32", 64),
    "ddp-bf16": lambda rows: rows.processes("bf16", 128),
    "input": Rows.input,
    "real": Rows.real,
    "line": Rows.line,
    "memory": Rows.memory,
    "avx2": Rows.avx2,
    "direct": Rows.direct,
    "threads": Rows.threads,
}


def peak_mebibytes(pid):
    """The most memory that a process and its children had, each at its own time; 0 once they have ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return (int(found[1]) / 1024 if found else 0) + sum(map(peak_mebibytes, children))


def measure(title, row, args):
    """The turns of each by its name, a round each; what cannot run is left out aloud, and raises where that leaves no comparison."""
    contestants = {contestant.name: contestant for contestant in [row.ours, *row.others]}
    turns = {name: [] for name in contestants}
    for number in range(1, args.rounds + 1):
        order = list(turns)
        random.Random(number).shuffle(order)
        for each in order:
            contestant = contestants[each]
            try:
                turn = quietest(lambda: {"figure": contestant.turn()}, contestant.cpu_seconds, args)
            except Failed as error:
                say(f"LEFT OUT: {title}, {each}: {error}")
                del turns[each]
                if each == row.ours.name or len(turns) == 1:
                    raise
                continue
            turns[each].append(turn)
            say(f"{title}, round {number}, {each}: {turn['figure']:,.0f} {row.unit}, foreign cores {turn['foreign_cores']:.2f}")
    return turns


def table(row, turns):
    figures = {name: [turn["figure"] for turn in some] for name, some in turns.items()}
    best, words, met = row.ratio(figures)
    lines = [f"| {row.title} | {row.unit} | least to most | foreign cores |", "|---|---|---|---|"]
    for name, values in sorted(figures.items(), key=lambda item: -statistics.median(item[1])):
        foreign = max(turn["foreign_cores"] for turn in turns[name])
        shown = f"**{name}**" if name in (best, row.ours.name) else name
        lines.append(f"| {shown} | {statistics.median(values):,.0f} | {min(values):,.0f} to {max(values):,.0f} | {foreign:.2f} |")
    summary = f"| {row.title} | {row.target_words()} {best} | {words} | {'met' if met else '**missed**'} |"
    return "\n".join(lines), summary


def versions(python):
    names = ["tensorflow-cpu", "torch", "jax"]
    code = f"from importlib.metadata import version\nprint(*(name + ' ' + version(name) for name in {names}), sep=', ')"
    return output([python, "-c", code]).strip()


def arguments():
    parser = common_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--data-dir", metavar="DIR", help="the files of CIFAR-10; without them pictures are drawn")
    args = parsed(parser)
    if len(os.sched_getaffinity(0)) < THREADS:
        parser.error(f"this needs {THREADS} cores")
    bound(THREADS)()  # and so are all that we start
    return args


def main():
    args = arguments()
    summaries, results, left_out = [], {}, {}
    try:
        rows = Rows(args)
        print(f"{machine_line()}\n{rows.tftrain.version}, {versions(rows.python)}; {args.rounds} rounds\n")
        for name in args.only:
            try:
                row = ROWS[name](rows)
                results[name] = measure(name, row, args)
            except Failed as error:
                left_out[name] = str(error)
                continue
            finally:
                rows.end()
            text, summary = table(row, results[name])
            summaries.append(summary)
            print(text, end="\n\n", flush=True)
        print("\n".join(["| row | target | tftrain is | |", "|---|---|---|---|", *summaries]))
        for name, why in left_out.items():
            print(f"\nLeft out: {name}: {why}")
        if args.json:
            facts = {"machine": machine(), "rounds": args.rounds, "steps": args.steps, "rows": results, "left_out": left_out}
            args.json.write_text(json.dumps(facts, indent=1) + "\n")
    except (Failed, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
