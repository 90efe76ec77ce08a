"""What run.py and more.py share: tftrain and the peers as what takes turns, and how a turn is measured."""
import argparse
import dataclasses
import json
import math
import os
import platform
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

    def output(self, arguments, **process):
        return output([self.program, *arguments], **process)

    def turn(self, variant, batch, warmup, steps):
        """As the answer of a worker; the losses are that of the last step alone."""
        flags = ["--num-warmup-batches", str(warmup), "--num-batches", str(steps), "--batch-size", str(batch)]
        flags += ["--threads", str(variant.threads), "--set", f"precision={variant.dtype}"]
        result = self.bench("step", *flags, preexec_fn=bound(variant.threads))
        return {"ms": result["median"]["step_ms"], "losses": [result["loss"]], "parameters": self.parameters}

    def bench(self, what, *flags, **process):
        """What `tftrain bench` found."""
        return json.loads(self.output(["bench", what, "--json", *flags], **process))

    def cpu_seconds(self):
        return ended_seconds()


class Worker:
    """A process of a peer that keeps what it has built between its turns."""

    def __init__(self, python, framework, threads, settings=MALLOC):
        self.messages = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [python, HERE / WORKERS[framework], str(threads)],
            env=environment(threads, settings),
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


def output(command, **process):
    """What a program prints, unless it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **process)
    if done.returncode != 0:
        raise Failed(last_line(done.stderr).removeprefix("error: ") or f"ended with {done.returncode}")
    return done.stdout


def environment(threads, settings):
    """That of a peer's process, which takes nothing else from ours that would choose other threads or kernels."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(LIBRARY_SETTINGS)}
    ours |= {"OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "1", "JAX_PLATFORMS": "cpu"}
    ours["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that stay
    if threads == 1:
        ours["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    return ours | settings


def last_line(text):
    return (text.strip().splitlines() or [""])[-1]


def bound(threads):
    """Binds a new process to the first cores that this one may use."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return lambda: os.sched_setaffinity(0, cores)


def ended_seconds():
    """CPU time of the processes that we started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


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


def quietest(turn, cpu_seconds, args):
    """The quietest of at most `args.tries` turns, with the cores that other processes used meanwhile."""
    best = None
    for tried in range(1, args.tries + 1):
        await_quiet(args.max_foreign)
        start, busy, own = time.monotonic(), busy_seconds(), cpu_seconds()
        answer = turn()
        foreign = busy_seconds() - busy - (cpu_seconds() - own)
        foreign = max(foreign / (time.monotonic() - start), 0.0)
        if best is None or foreign < best["foreign_cores"]:
            best = answer | {"foreign_cores": foreign}
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


def machine_line():
    facts = machine()
    return f"{facts['cpu']}, {facts['cores']} cores, {' '.join(facts['flags'])}, Linux {facts['kernel']}, {facts['libc']}"


def common_parser(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="TFTRAIN", help="the program, e.g. target/release/tftrain")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=30, help="timed steps of a turn")
    parser.add_argument("--max-foreign", type=float, default=0.1, metavar="CORES", help="a turn with more is repeated")
    parser.add_argument("--tries", type=positive, default=3, help="turns at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every turn, the machine and the versions")
    parser.add_argument("--venv", type=Path, default=HERE.parents[1] / "target" / "peers", metavar="DIR")
    return parser


def parsed(parser):
    """The arguments, of which the common ones are right."""
    args = parser.parse_args()
    if sys.platform != "linux":
        parser.error("this reads /proc and binds processes to cores, so it needs Linux")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: there is no folder {args.json.parent}")
    if not os.access(args.program, os.X_OK) or os.path.isdir(args.program):
        parser.error(f"{args.program} is no program; `cargo build --release` makes target/release/tftrain")
    args.program = os.path.abspath(args.program)
    return args


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)
