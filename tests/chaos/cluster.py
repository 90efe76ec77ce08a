"""A cluster of the line model as processes on this machine, each with an own loopback address, and what can be seen of it."""
import glob
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time

NUMBERS = itertools.count(1)
# Seconds: how long others are waited for, and a time in which everything must be over, on a busy machine too.
RENDEZVOUS = 6
PATIENCE = 30
# Processes that have not been waited for.
LIVING = set()


def leave(number, _frame):
    """The runner is asked to end: so do its tasks."""
    for process in list(LIVING):
        process.kill()
    os._exit(128 + number)


class Task:
    """A process; what it says is kept with the time at which it did."""

    def __init__(self, name, command, folder):
        self.name, self.command, self.folder = name, command, folder
        self.starts, self.words = 0, []
        self.start()

    def start(self, more=""):
        self.starts += 1
        self.output = f"{self.folder}/{self.name}.{self.starts}.out"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                (self.command + more).split(),
                cwd=self.folder,
                env=os.environ | {"RUST_LOG": "warn", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                text=True,
            )
        LIVING.add(self.process)
        self.listener = threading.Thread(target=self.listen, args=[self.process.stderr], daemon=True)
        self.listener.start()

    def listen(self, errors):
        with errors:
            for line in errors:
                self.words.append((time.monotonic(), line.rstrip()))

    def lives(self):
        return self.process.poll() is None

    def send(self, name):
        if self.lives():
            self.process.send_signal(getattr(signal, "SIG" + name))

    def lines(self):
        with open(self.output, "rb") as output:
            return output.read().count(b"\n")

    def memory(self):
        """KiB of anonymous memory."""
        with open(f"/proc/{self.process.pid}/status") as status:
            return max((int(line.split()[1]) for line in status if line.startswith("RssAnon")), default=0)

    def end(self, deadline):
        """The exit code; a task that is still there at the deadline is HUNG."""
        try:
            code = self.process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = "HUNG"
        # A process that is left may hold the other end.
        self.listener.join(5)
        LIVING.discard(self.process)
        return {-2: "struck down", -9: "killed", -15: "struck down"}.get(code, code)


class Cluster:
    """`ps` parameter servers and `workers` in a mode; the first of `steppers` is the chief or the client."""

    def __init__(self, program, mode, ps, workers, head="model: line\ndata: {name: line}\n", flags=""):
        self.program = program
        self.place = tempfile.TemporaryDirectory(prefix="chaos-")
        self.folder = os.path.realpath(self.place.name)
        number = next(NUMBERS)
        address = f"127.{1 + os.getpid() % 250}.{number // 250}.{1 + number % 250}"
        hosts = [f'"{address}:{7000 + index}"' for index in range(ps + workers)]
        text = f"{head}cluster:\n  ps: [{', '.join(hosts[:ps])}]\n" if ps else f"{head}cluster:\n"
        text += f"  worker: [{', '.join(hosts[ps:])}]\n  mode: {mode}\n"
        with open(f"{self.folder}/cluster.yaml", "w") as file:
            file.write(text)
        flags = f"--config cluster.yaml --max-steps 100000000 --rendezvous-timeout {RENDEZVOUS} --summary-every 0 {flags}"
        chief = " --train-dir run --log-every 20"
        if "--save" not in flags:
            chief += " --save-steps 200"

        def task(name, verb, own):
            return Task(name, f"{program} {verb} {flags}{own}", self.folder)

        def member(job, index, verb="train", more=""):
            return task(f"{job}:{index}", verb, f" --job-name {job} --task-index {index}{more}")

        self.ps = [member("ps", index) for index in range(ps)]
        if mode == "in-graph":
            self.workers = [member("worker", index, "serve") for index in range(workers)]
            self.steppers = [task("client:0", "train", chief)]
        else:
            self.workers = [member("worker", 0, more=chief)]
            self.workers += [member("worker", i, more=" --log-every 20") for i in range(1, workers)]
            self.steppers = self.workers
        self.chief = self.steppers[0]
        self.tasks = list(dict.fromkeys(self.ps + self.workers + self.steppers))

    def rows(self):
        """What the chief's metrics say of steps, in the order of lines; a torn last line is none."""
        path = f"{self.folder}/run/metrics.jsonl"
        if not os.path.exists(path):
            return []
        with open(path) as metrics:
            rows = [json.loads(line) for line in metrics if line.endswith("\n")]
        return [row for row in rows if row.get("kind") == "step"]

    def steps(self):
        return [row["step"] for row in self.rows()]

    def checkpoints(self):
        """Path by step."""
        paths = glob.glob(f"{self.folder}/run/model.ckpt-*.safetensors")
        return {int(path.split("-")[-1].split(".")[0]): path for path in paths}

    def faults(self):
        """Steps backwards or twice, a model trained anew, checkpoints that cannot be read, processes that are left."""
        rows, found = self.rows(), []
        steps = [row["step"] for row in rows]
        found += [f"step {b} after {a}" for a, b in itertools.pairwise(steps) if b <= a]
        # The line model begins at 63 and is below 1 after 20 steps.
        anew = [row for row in rows if row["step"] >= 200 and row["loss"] > 10]
        found += [f"trained anew: {row['loss']} at step {row['step']}" for row in anew]
        for path in self.checkpoints().values():
            command = [self.program, "inspect", "checkpoint", path]
            read = subprocess.run(command, capture_output=True, text=True)
            found += [f"unreadable: {read.stderr[-200:]}"] * bool(read.returncode)
        for entry in glob.glob("/proc/[0-9]*/cwd"):
            try:
                if os.readlink(entry).startswith(self.folder):
                    found.append(f"process left: {entry}")
                    os.kill(int(entry.split("/")[2]), signal.SIGKILL)
            except OSError:
                pass  # It has ended, or is somebody else's.
        return found

    def close(self):
        """Ends what is left, by its id."""
        for task in self.tasks:
            task.send("KILL")
            task.end(time.monotonic() + PATIENCE)
        self.place.cleanup()


signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
