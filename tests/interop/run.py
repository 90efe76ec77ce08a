#!/usr/bin/env python3
"""TensorFlow's own client, and its servers, against `tftrain serve`: run.py PROGRAM PYTHON [CASE...].

PYTHON has TensorFlow. Each case says what must hold; outputs and placement lines are compared with those of TensorFlow's
own servers (expected/, written by `run.py tensorflow PYTHON record`). With `tensorflow` as PROGRAM the cases run against
those servers. The exit code is the number of cases that failed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM, PYTHON = sys.argv[1:3]
ENV = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Cluster:
    """Tasks of tftrain; `alien` jobs are left to others. `env` is what they find beside what is always there."""

    def __init__(self, jobs, alien=(), env={}):
        self.env = {**ENV, **env}
        ports = iter(free_ports(sum(jobs.values())))
        self.spec = {job: [f"127.0.0.1:{next(ports)}" for _ in range(n)] for job, n in jobs.items()}
        self.dir = Path(tempfile.mkdtemp())
        file = self.dir / "cluster.yaml"
        file.write_text(json.dumps({"cluster": {"mode": "session", **self.spec}}))
        self.tasks, self.logs = {}, {}
        for job, n in jobs.items():
            for i in range(n if job not in alien else 0):
                self.start(job, i)

    def start(self, job, i):
        log = self.dir / f"{job}{i}.log"
        command = [PYTHON, HERE / "server.py", json.dumps(self.spec), job, str(i)] if PROGRAM == "tensorflow" else [
            PROGRAM, "serve", "--config", self.dir / "cluster.yaml", "--job-name", job, "--task-index", str(i)]
        with open(log, "a") as out:
            self.tasks[job, i] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=self.dir, env=self.env)
        self.logs[job, i] = log

    def target(self, job, i):
        return "grpc://" + self.spec[job][i]

    def log(self, job, i):
        return self.logs[job, i].read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for task in self.tasks.values():
            task.send_signal(signal.SIGTERM)
        for task in self.tasks.values():
            task.wait(10)
        shutil.rmtree(self.dir)


def python(*args, timeout=120):
    """What a script says, and its exit code."""
    done = subprocess.run([PYTHON, *map(str, args)], env=ENV, timeout=timeout, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    return done.stdout, done.returncode


def placement(log):
    return [line for line in log.splitlines() if re.fullmatch(r"\S+: \(\w+\): /job:\S+", line)]


def demo(name, *more):
    with Cluster({"ps": 2, "work": 3}) as cluster:
        out, code = python(HERE / "demos.py", cluster.target("work", 2), name, *more)
        return out, code, placement(cluster.log("work", 2))


def expect(condition, *said):
    if not condition:
        raise AssertionError("\n".join(map(str, said)))


def expected(name):
    return (HERE / "expected" / name).read_text()


def is_expected(name, *more):
    out, code, lines = demo(name, *more)
    expect(code == 0 and results(out) == expected(name + ".txt"), out)
    expect(lines == expected(name + ".placement.txt").splitlines(), *lines)


def results(out):
    """The lines that a script prints itself: arrays and strings."""
    lines = out.splitlines()
    begin = next((i for i, line in enumerate(lines) if re.match(r"\[|b'", line)), len(lines))
    return "\n".join(lines[begin:]) + "\n"


def record():
    """Writes down what TensorFlow's servers say."""
    (HERE / "expected").mkdir(exist_ok=True)
    for name in RECORDED:
        out, code, lines = demo(name)
        expect(code == 0, out)
        (HERE / "expected" / f"{name}.txt").write_text(results(out))
        (HERE / "expected" / f"{name}.placement.txt").write_text("".join(line + "\n" for line in lines))
    for name in ("demo01", "var", "resvar", "fed", "branches"):
        with Cluster({"ps": 2, "work": 3}) as cluster:
            calls = HERE.parent / "data" / "sessions" / name
            out, code = python(HERE / "tap.py", cluster.target("work", 2), calls, HERE / "demos.py", "{}", name)
            expect(code == 0, out)
    for name in ("gpu", "badgpu", "badjob"):
        out, _, _ = demo(name)
        (HERE / "expected" / f"{name}.error.txt").write_text(refusal(out))


def refusal(out):
    """What the server says, from the client's exception."""
    return re.search(r"Cannot assign a device for operation.*?\n\t \[\[\w+\]\]\n", out, re.S)[0]


def refuses(name):
    out, code, _ = demo(name)
    expect(code != 0 and "InvalidArgumentError" in out and refusal(out) == expected(name + ".error.txt"), out)


def fails(name, *texts):
    out, code, _ = demo(name)
    expect(code != 0 and all(text in out for text in texts), out)


def variables(name, text):
    is_expected(name)
    out, _, _ = demo(name)
    # Either of the two is found first.
    expect("UNINIT FailedPreconditionError" in out and text in out, out)
    expect("From /job:ps/replica:0/task:" in out, out)


def says(name, *texts):
    out, code, _ = demo(name)
    expect(code == 0 and all(text in out for text in texts), out)


def regression(*flags, alien=(), resume=False):
    """Two workers train to y = 5x + 8: by steps so small, and so many, that the noise of their examples is a fourth of what is allowed."""
    with Cluster({"ps": 1, "worker": 2}, alien) as cluster:
        logdir = cluster.dir / "logs"
        for steps in (1500, 1600)[: 2 if resume else 1]:
            workers = []
            for i in range(2):
                target = [] if alien else ["--target", cluster.target("worker", i)]
                command = [PYTHON, HERE / "regression.py", "--cluster", json.dumps(cluster.spec), "--task", str(i),
                           "--logdir", logdir, "--steps", str(steps), *target, *flags]
                workers.append(subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            for i, worker in enumerate(workers):
                try:
                    out, _ = worker.communicate(timeout=240)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    out, _ = worker.communicate()
                end = re.search(r"ended at (\d+) weight (\S+) bias (\S+)", out)
                expect(end, f"worker {i}:", out, *(cluster.log(*task) for task in cluster.tasks))
                weight, bias = float(end[2]), float(end[3])
                expect(abs(weight - 5) <= 0.05 and abs(bias - 8) <= 0.05, out)
                expect(i > 0 or "saved" in out, out)
                if steps == 1600 and i == 0:
                    expect(int(re.search(r"began at (\d+)", out)[1]) >= 1500, out)


def cancelled_by_its_client():
    """A client that vanishes leaves no step behind, and other sessions go on."""
    with Cluster({"ps": 1, "worker": 1}) as cluster:
        script = ("import sys, tensorflow.compat.v1 as tf; tf.disable_eager_execution()\n"
                  "with tf.device('/job:ps/task:0'): q = tf.FIFOQueue(1, tf.float32, [[]], shared_name='q')\n"
                  "s = tf.Session(sys.argv[1]); print('waits', flush=True); print(s.run(q.dequeue()))")
        vanishing = subprocess.Popen([PYTHON, "-c", script, cluster.target("worker", 0)], env=ENV, stdout=subprocess.PIPE, text=True)
        expect(vanishing.stdout.readline().strip() == "waits")
        time.sleep(3)
        vanishing.kill()
        vanishing.wait()
        time.sleep(1)
        # Had its step lived on, it would take this one element.
        out, code = python("-c", "import sys, tensorflow.compat.v1 as tf; tf.disable_eager_execution()\n"
                           "with tf.device('/job:ps/task:0'): q = tf.FIFOQueue(1, tf.float32, [[]], shared_name='q')\n"
                           "s = tf.Session(sys.argv[1]); s.run(q.enqueue(3.0)); import time; time.sleep(1); print('size', s.run(q.size()))",
                           cluster.target("worker", 0))
        expect(code == 0 and "size 1" in out, out)


def killed_task():
    """A task that dies in a step is named; sessions without it live on; it may come back."""
    with Cluster({"ps": 1, "worker": 2}) as cluster:
        script = ("import sys, tensorflow.compat.v1 as tf; tf.disable_eager_execution()\n"
                  "with tf.device('/job:ps/task:0'): q = tf.FIFOQueue(1, tf.float32, [[]], shared_name='q')\n"
                  "own = tf.constant(1.0) + 2.0\n"
                  "s = tf.Session(sys.argv[1]); s.run(own); print('waits', flush=True)\n"
                  "try: s.run(q.dequeue())\n"
                  "except tf.errors.UnavailableError as e: print('UNAVAILABLE', e)\n"
                  "print('own', s.run(own), flush=True)\n")
        client = subprocess.Popen([PYTHON, "-c", script, cluster.target("worker", 0)], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        while client.stdout.readline().strip() != "waits":
            pass
        time.sleep(1)
        cluster.tasks["ps", 0].kill()
        out, _ = client.communicate(timeout=60)
        expect("UNAVAILABLE" in out and "/job:ps/replica:0/task:0" in out and "own 3.0" in out, out)
        cluster.tasks["ps", 0].wait()
        cluster.start("ps", 0)
        out, code = python("-c", script.replace("s.run(q.dequeue())", "print(s.run(q.size()))"), cluster.target("worker", 0))
        expect(code == 0 and "own 3.0" in out, out)


def many_clients():
    """Sessions by the dozen, at once and one after the other."""
    with Cluster({"ps": 1, "worker": 1}) as cluster:
        out, code = python("-c", """
import sys, threading, tensorflow.compat.v1 as tf
tf.disable_eager_execution()
with tf.device('/job:ps/task:0'):
    v = tf.get_variable('v', [], initializer=tf.zeros_initializer(), use_resource=True)
    up = v.assign_add(1.0, use_locking=True)
tf.get_default_graph().finalize
init = tf.global_variables_initializer()
with tf.Session(sys.argv[1]) as s: s.run(init)
def one():
    for _ in range(4):
        with tf.Session(sys.argv[1], graph=v.graph) as s:
            for _ in range(5): s.run(up)
threads = [threading.Thread(target=one) for _ in range(50)]
[t.start() for t in threads]; [t.join() for t in threads]
with tf.Session(sys.argv[1]) as s: print('sum', s.run(v))
""", cluster.target("worker", 0))
        expect(code == 0 and "sum 1000.0" in out, out)


def memory_is_flat():
    """A thousand sessions and 100,000 steps leave the tasks as large as they were."""
    with Cluster({"ps": 1, "worker": 1}) as cluster:
        script = """
import sys, tensorflow.compat.v1 as tf
tf.disable_eager_execution()
with tf.device('/job:ps/task:0'):
    v = tf.get_variable('v', [1000], initializer=tf.zeros_initializer(), use_resource=True)
    up = v.assign_add(tf.ones([1000]))
y = v.read_value() + 1.0
with tf.Session(sys.argv[1]) as s: s.run(v.initializer)
def cycles(n):
    for _ in range(n):
        with tf.Session(sys.argv[1]) as s: s.run([y, up])
def steps(n):
    with tf.Session(sys.argv[1]) as s:
        run = s.make_callable([y, up.op])
        for _ in range(n): run()
for work in (lambda: (cycles(100), steps(5000)), lambda: cycles(1000), lambda: steps(100000)):
    work(); print('done', flush=True); sys.stdin.readline()
"""
        client = subprocess.Popen([PYTHON, "-c", script, cluster.target("worker", 0)], env=ENV, text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        sizes = []
        for _ in range(3):
            expect(client.stdout.readline() == "done\n", "the client ended")
            sizes.append([resident(task.pid) for task in cluster.tasks.values()])
            client.stdin.write("\n")
            client.stdin.flush()
        client.wait()
        print("    KiB of ps and worker after warming up, 1,000 sessions more, 100,000 steps more:", *sizes)
        for before, after in zip(sizes[0], sizes[2]):
            expect(after < before + 8192, f"grown from {before} to {after} KiB")


def gpus():
    """A client without CUDA uses GPUs of tasks: those of the stand-in, which is a CUDA made of CPU threads."""
    if PROGRAM == "tensorflow" or not shutil.which("g++"):
        return print("    skipped: it needs tftrain and g++")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash", HERE.parent / "fakecuda/build.sh", folder + "/cuda"], check=True)
        env = {"LD_LIBRARY_PATH": folder + "/cuda", "CUDA_VISIBLE_DEVICES": "0,1", "FAKE_CUDA_DEVICES": "2",
               "FAKE_CUDA_CACHE": folder + "/kernels", "XDG_CACHE_HOME": folder + "/cache"}
        with Cluster({"ps": 1, "work": 1}, env=env) as cluster:
            out, code = python(HERE / "gpus.py", cluster.target("work", 0), timeout=240)
            lines = placement(cluster.log("work", 0))
        task = "/job:work/replica:0/task:0/device:"
        expect(code == 0 and all(f"{task}GPU:{i} GPU 4294967296" in out for i in range(2)), out)
        expect("trained alike" in out and "product [[11.]]" in out, out)
        expect("device specification '/job:work/task:0/device:GPU:0' because no supported kernel for GPU devices is available." in out, out)
        there = {line.split()[1] for line in lines if line.endswith(task + "GPU:1")}
        for op in ("Conv2D", "Conv2DBackpropFilter", "BiasAdd", "Relu", "MaxPool", "LRNGrad", "MatMul", "Mean"):
            expect(f"({op}):" in there, op, *sorted(there))


def resident(pid):
    """KiB of memory of a process that no file backs."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


RECORDED = ("demo01", "plain", "cpu", "hello", "callable", "var", "resvar")
CASES = {
    "demo01": lambda: is_expected("demo01"),
    "plain": lambda: is_expected("plain"),
    "cpu": lambda: is_expected("cpu"),
    "gpu-soft": lambda: says_soft(),
    "gpu": lambda: refuses("gpu"),
    "badgpu": lambda: refuses("badgpu"),
    "badjob": lambda: refuses("badjob"),
    "hello": lambda: is_expected("hello"),
    "var": lambda: variables("var", "Attempting to use uninitialized value weights_"),
    "resvar": lambda: variables("resvar", "Could not find variable weights_"),
    "devices": lambda: says("devices", *(f"/job:{j}/replica:0/task:{i}/device:CPU:0 CPU" for j, i in [("ps", 0), ("ps", 1), ("work", 2)])),
    "callable": lambda: is_expected("callable"),
    "reset": lambda: says("reset", "AbortedError", "is not found."),
    "fed": lambda: says("fed", "[[3.0, 5.0]] [[6.0, 7.0]]", "(0, 2)", "InvalidArgumentError True"),
    "branches": lambda: says("branches", "6.0 103.0"),
    "partial": lambda: fails("partial", "UnimplementedError"),
    "unknown": lambda: fails("unknown", "UnimplementedError", "Bincount", "demos.py"),
    "async": lambda: regression(),
    "async-resource": lambda: regression("--resource"),
    "sync": lambda: regression("--sync"),
    "sync-resource": lambda: regression("--sync", "--resource"),
    "article3-resume": lambda: regression("--article", "3", "--rate", "0.01", resume=True),
    "mixed-async": lambda: regression(alien=("worker",)),
    "mixed-sync": lambda: regression("--sync", alien=("worker",)),
    "mixed-article3": lambda: regression("--article", "3", "--rate", "0.01", alien=("worker",)),
    "vanished-client": cancelled_by_its_client,
    "killed-task": killed_task,
    "many-clients": many_clients,
    "memory": memory_is_flat,
    "gpus": gpus,
}


def says_soft():
    out, code, lines = demo("gpu", "soft")
    expect(code == 0 and out.splitlines()[-1] == "[5]", out)
    expect("add: (AddV2): /job:work/replica:0/task:2/device:CPU:0" in lines, *lines)


def main():
    if sys.argv[3:] == ["record"]:
        return record()
    failed = 0
    for name in sys.argv[3:] or CASES:
        begun = time.time()
        try:
            CASES[name]()
            print(f"ok {name} ({time.time() - begun:.0f} s)", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED {name} ({time.time() - begun:.0f} s): {error}", flush=True)
    return failed


sys.exit(main())
