#!/usr/bin/env python3
"""TensorFlow's own client on tasks of tftrain and on TensorFlow's own servers, in turns.

usage: sessions.py TFTRAIN PYTHON [--rounds N] [--seconds S]

PYTHON has TensorFlow. Each round starts fresh tasks on loopback, a ps and two workers, runs each script on either, and counts
steps for S seconds after a second of warm-up:

- small: session.run of 0.1 x + 0.3 over 100 floats on the session's own task, and its inputs on the ps; one client
- async: the second article's regression by two clients, steps of both together
- sync: the same with SyncReplicasOptimizer, global steps

The client, in Python, is the same on both sides and has its share in both. Prints steps/s, and the ratios of neighbouring turns."""
import argparse, json, os, signal, socket, statistics, subprocess, sys, tempfile, time

ENV = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "interop", "server.py")
SCRIPTS = ("small, own task", "small, two tasks", "async", "sync")


def small(tf, target, device, seconds):
    with tf.device(device):
        x = tf.placeholder(tf.float32, [100])
        with tf.device("/job:ps/task:0" if device else ""):
            c = tf.placeholder(tf.float32, [100])
        y = x * 0.1 + 0.3 + c
    values = [0.5] * 100
    with tf.Session(target) as sess:
        def step():
            sess.run(y, {x: values, c: values})
        return count(step, seconds)


def count(step, seconds):
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        step()
    steps, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        step()
        steps += 1
    return steps / (time.perf_counter() - begun)


def train(tf, spec, task, sync, seconds):
    cluster = tf.train.ClusterSpec(spec)
    with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{task}", cluster=cluster)):
        x, y = tf.placeholder(tf.float32), tf.placeholder(tf.float32)
        global_step = tf.train.get_or_create_global_step()
        w = tf.get_variable("weight", [1], initializer=tf.random_normal_initializer())
        b = tf.get_variable("bias", [1], initializer=tf.random_normal_initializer())
        cost = tf.square(y - (tf.multiply(x, w) + b))
        optimizer, more = tf.train.GradientDescentOptimizer(0.01), {}
        if sync:
            optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=2, total_num_replicas=2)
        op = optimizer.minimize(cost, global_step=global_step)
        if sync:
            tokens, runner = optimizer.get_init_tokens_op(), optimizer.get_chief_queue_runner()
            more = {"ready_for_local_init_op": optimizer.ready_for_local_init_op,
                    "local_init_op": optimizer.local_step_init_op if task else optimizer.chief_init_op}
        init = tf.global_variables_initializer()
    supervisor = tf.train.Supervisor(is_chief=task == 0, init_op=init, summary_op=None, saver=None,
                                     global_step=global_step, recovery_wait_secs=1, **more)
    with supervisor.prepare_or_wait_for_session("grpc://" + spec["worker"][task]) as sess:
        if sync and task == 0:
            supervisor.start_queue_runners(sess, [runner])
            sess.run(tokens)
        # Both begin when the first global steps of the other show.
        print("ready", flush=True)
        sys.stdin.readline()
        rate = count(lambda: sess.run([op, global_step], {x: [0.5], y: [10.5]}), seconds)
        print("rate", rate, flush=True)
        # The other may need this one's gradients until it has counted too.
        while True:
            sess.run([op, global_step], {x: [0.5], y: [10.5]})


def child(args):
    import tensorflow.compat.v1 as tf
    tf.disable_eager_execution()
    spec, script, task = json.loads(args[0]), args[1], int(args[2])
    seconds = float(args[3])
    if script.startswith("small"):
        device = "/job:worker/task:0" if "two" in script else ""
        print("rate", small(tf, "grpc://" + spec["worker"][0], device, seconds), flush=True)
    else:
        tf.disable_resource_variables()
        train(tf, spec, task, script == "sync", seconds)


def turn(program, python, script, seconds):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    spec = {"ps": ports[:1], "worker": ports[1:]}
    with tempfile.TemporaryDirectory() as folder:
        config = os.path.join(folder, "cluster.yaml")
        with open(config, "w") as file:
            json.dump({"cluster": {"mode": "session", **spec}}, file)
        tasks, clients = [], []
        for job, index in (("ps", 0), ("worker", 0), ("worker", 1)):
            command = [python, SERVER, json.dumps(spec), job, str(index)] if program is None else [
                program, "serve", "--config", config, "--job-name", job, "--task-index", str(index)]
            tasks.append(subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        try:
            clients += [
                subprocess.Popen([python, __file__, "--child", json.dumps(spec), script, str(i), str(seconds)], env=ENV,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                for i in range(1 if script.startswith("small") else 2)]
            if len(clients) > 1:
                for client in clients:
                    while "ready" not in (client.stdout.readline() or sys.exit(f"{script}: a client ended")):
                        pass
                for client in clients:
                    client.stdin.write("go\n")
                    client.stdin.flush()
            rates = []
            for client in clients:
                line = client.stdout.readline()
                while not line.startswith("rate"):
                    line = client.stdout.readline() or sys.exit(f"{script}: a client ended")
                rates.append(float(line.split()[1]))
            # In lock step each client counts every global step.
            return min(rates) if script == "sync" else sum(rates)
        finally:
            # One may wait for the other's gradients for ever.
            for client in clients:
                client.kill()
                client.wait()
            for task in tasks:
                task.send_signal(signal.SIGTERM if program else signal.SIGKILL)
            for task in tasks:
                task.wait()


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tftrain")
    parser.add_argument("python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--only", choices=SCRIPTS, action="append")
    args = parser.parse_args()
    program = os.path.abspath(args.tftrain)
    print("| script | TensorFlow's servers, steps/s | tftrain, steps/s | ratio |\n|---|---|---|---|")
    for script in args.only or SCRIPTS:
        theirs, ours = [], []
        for i in range(args.rounds):
            for who in (None, program) if i % 2 else (program, None):
                (ours if who else theirs).append(turn(who, args.python, script, args.seconds))
        ratios = [a / b for a, b in zip(ours, theirs)]
        cell = lambda v, f: f"{statistics.median(v):{f}} [{min(v):{f}} {max(v):{f}}]"
        print(f"| {script} | {cell(theirs, '.0f')} | {cell(ours, '.0f')} | {cell(ratios, '.2f')} |", flush=True)


main()
