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
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARMUP = 10
CHECKED_STEPS = 3
# Of the first losses, relative; that of f32 tells whether there is LRN. tftrain draws other values from the same distributions.
TOLERANCE = {"f32": 2e-5, "bf16": 1e-3}
TFTRAIN_TOLERANCE = 5e-3
# Blocks of memory are kept, in huge pages, and not given back and faulted in again every step.
MALLOC = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824"
    ":glibc.malloc.trim_threshold=8589934592:glibc.malloc.top_pad=268435456",
    "THP_MEM_ALLOC_ENABLE": "1",
}
# What would choose other threads, kernels or instructions than a peer's own default.
LIBRARY_SETTINGS = ("OMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "KMP_", "XLA_", "TF_", "NPY_")

LRNS = ["as written", "banded", "none"]
PEERS = {
    "TensorFlow": {"session": LRNS},
    "PyTorch": {"eager": LRNS, "compiled": ["as written", "banded"]},
    "JAX": {"jit": LRNS},
}
WORKERS = {"TensorFlow": "tensorflow_worker.py", "PyTorch": "torch_worker.py", "JAX": "jax_worker.py"}


class Failed(Exception):
    """What cannot be measured, and why."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of a table."""

    framework: str
    mode: str
    lrn: str
    dtype: str
    threads: int

    def __str__(self):
        words = {"as written": ", LRN as written", "banded": ", LRN banded", "none": ", without LRN (another network)"}
        return self.framework if self.is_ours() else f"{self.framework} {self.mode}{words[self.lrn]}"

    def is_ours(self):
        return self.framework == "tftrain"

    def is_same_network(self):
        return self.lrn != "none"


class Tftrain:
    """`tftrain bench step`, anew for each turn."""

    def __init__(self, program):
        self.program = program
        found = re.search(r"([\d,]+) parameters", self.output(["inspect", "model", "cifar10"]))
        if not found:
            raise Failed(f"`{program} inspect model cifar10` does not tell the parameters; is it tftrain?")
        self.parameters = int(found[1].replace(",", ""))
        self.version = self.output(["--version"]).strip()

    def output(self, arguments, bind=None):
        done = subprocess.run([self.program, *arguments], capture_output=True, text=True, preexec_fn=bind)
        if done.returncode != 0:
            raise Failed(last_line(done.stderr).removeprefix("error: ") or f"ended with {done.returncode}")
        return done.stdout

    def turn(self, variant, batch, warmup, steps):
        """As the answer of a worker; the losses are that of the last step alone."""
        flags = ["--json", "--num-warmup-batches", str(warmup), "--num-batches", str(steps)]
        flags += ["--batch-size", str(batch), "--threads", str(variant.threads), "--set", f"precision={variant.dtype}"]
        result = json.loads(self.output(["bench", "step", *flags], bind=bound(variant.threads)))
        return {"ms": result["median"]["step_ms"], "losses": [result["loss"]], "parameters": self.parameters}

    def cpu_seconds(self):
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime


class Worker:
    """A process of a peer that keeps what it has built between its turns."""

    def __init__(self, python, framework, threads):
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LIBRARY_SETTINGS)}
        environment |= MALLOC | {"OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "1", "JAX_PLATFORMS": "cpu"}
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that stay
        if threads == 1:
            environment["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        self.messages = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, HERE / WORKERS[framework], str(threads)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            preexec_fn=bound(threads),
        )
        self.version = f"{framework} {self.answer()['version']}"

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.messages.seek(0)
            raise Failed(last_line(self.messages.read()) or f"ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def turn(self, variant, batch, warmup, steps):
        """The median milliseconds of a step, the loss of each step, and the number of parameters."""
        asked = {"mode": variant.mode, "lrn": variant.lrn, "dtype": variant.dtype}
        asked |= {"batch": batch, "warmup": warmup, "steps": steps}
        try:
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            pass  # `answer` tells why
        return self.answer()

    def cpu_seconds(self):
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.kill()
        self.process.communicate()


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def bound(threads):
    """Binds a new process to the first cores that this one may use."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return lambda: os.sched_setaffinity(0, cores)


def busy_seconds():
    """CPU time of all processes, in seconds, and what the hypervisor gave to others."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def await_quiet(limit, seconds=5):
    """Waits until others use less than `limit` cores, but not for long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = busy_seconds()
        time.sleep(0.4)
        if (busy_seconds() - before) / 0.4 <= limit:
            return


def measured(subject, variant, args):
    """The quietest of at most `args.tries` turns, with the cores that other processes used meanwhile."""
    best = None
    for tried in range(1, args.tries + 1):
        await_quiet(args.max_foreign)
        start, busy, own = time.monotonic(), busy_seconds(), subject.cpu_seconds()
        answer = subject.turn(variant, args.batch, WARMUP, args.steps)
        foreign = busy_seconds() - busy - (subject.cpu_seconds() - own)
        foreign = max(foreign / (time.monotonic() - start), 0.0)
        if not math.isfinite(answer["losses"][-1]):
            raise Failed("diverged")
        if best is None or foreign < best["foreign_cores"]:
            best = {"examples_per_sec": args.batch / answer["ms"] * 1e3, "foreign_cores": foreign}
        if foreign <= args.max_foreign:
            break
    return best | {"tries": tried}


def check(answers):
    """Raises unless all compute the same network: as many parameters, and the same first losses."""
    _, reference = min(answers.items(), key=lambda item: (item[0].is_ours(), item[0].dtype != "f32"))
    for variant, answer in answers.items():
        tolerance = TFTRAIN_TOLERANCE if variant.is_ours() else TOLERANCE[variant.dtype]
        pairs = list(zip(answer["losses"], reference["losses"]))
        if answer["parameters"] != reference["parameters"]:
            raise Failed(f"{variant} has {answer['parameters']} parameters, others {reference['parameters']}")
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs):
            raise Failed(f"{variant} at {variant.dtype} is another network: losses (its, others') {pairs}")


def install(folder):
    """A virtual environment with the peers; returns its Python."""
    python = folder / "bin" / "python"
    steps = [] if python.exists() else [("make a virtual environment", [sys.executable, "-m", "venv", str(folder)])]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps.append(("install the peers", [*pip, "-r", str(HERE / "requirements.txt")]))
    for what, command in steps:
        say(f"{what}: {' '.join(command)}")
        if subprocess.run(command).returncode != 0:
            raise Failed(f"could not {what}; pip needs a package index (or --venv DIR where they are), and 6 GB of disk")
    return python


def say(line):
    print(f"# {line}", file=sys.stderr, flush=True)


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


def ratio_of(speeds, ours, peer):
    ratios = [a / b for a, b in zip(speeds[ours], speeds[peer])]
    return f"{statistics.median(ratios):.2f} x [{min(ratios):.2f} {max(ratios):.2f}]"


def machine():
    cpu = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", cpu)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", cpu))
    return {
        "cpu": model[1] if model else platform.machine(),
        "flags": sorted(flags),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="TFTRAIN", help="the program, e.g. target/release/tftrain")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=lambda text: [positive(t) for t in text.split(",")], default=[2, 1], help="2,1")
    parser.add_argument("--dtypes", type=dtypes, default=["f32", "bf16"], help="f32,bf16")
    parser.add_argument("--batch", type=positive, default=128)
    parser.add_argument("--steps", type=positive, default=30, help="timed steps of a turn")
    parser.add_argument("--only", type=pattern, default="", metavar="REGEX", help="rows whose name has it; tftrain always")
    parser.add_argument("--max-foreign", type=float, default=0.1, metavar="CORES", help="a turn with more is repeated")
    parser.add_argument("--tries", type=positive, default=3, help="turns at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every turn, the machine and the versions")
    parser.add_argument("--venv", type=Path, default=HERE.parents[1] / "target" / "peers", metavar="DIR")
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("this reads /proc and binds processes to cores, so it needs Linux")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    if max(args.threads) > len(os.sched_getaffinity(0)):
        parser.error(f"--threads: this machine lets us use {len(os.sched_getaffinity(0))} cores")
    if not os.access(args.program, os.X_OK) or os.path.isdir(args.program):
        parser.error(f"{args.program} is no program; `cargo build --release` makes target/release/tftrain")
    args.program = os.path.abspath(args.program)
    return args


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


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
        facts = machine()
        print(f"{facts['cpu']}, {facts['cores']} cores, {' '.join(facts['flags'])}, Linux {facts['kernel']}, {facts['libc']}")
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
