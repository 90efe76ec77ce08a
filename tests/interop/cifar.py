"""The CIFAR-10 network of the tutorial with in-graph towers: 20 steps on tftrain's tasks and on TensorFlow's own servers.

usage: cifar.py TFTRAIN [--steps N] [--batch N] [--checkpoint]

One parameter server holds the variables and their moving averages; each of two workers computes one tower. The same client
builds the same graph for both clusters. Losses must agree within 1e-4. With --checkpoint the variables go to and fro
between the two by files of TensorFlow's Saver, and to `tftrain inspect`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
TOLERANCE = 1e-4


def ports(count):
    import socket

    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    found = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return found


class Cluster:
    """A parameter server and two workers; `command` starts one task."""

    def __init__(self, command, folder):
        a, b, c = ports(3)
        self.spec = {"ps": [f"127.0.0.1:{a}"], "worker": [f"127.0.0.1:{b}", f"127.0.0.1:{c}"]}
        self.target = f"grpc://127.0.0.1:{b}"
        self.tasks = []
        self.log = open(os.path.join(folder, f"servers-{a}.log"), "w")
        for job, hosts in self.spec.items():
            for index in range(len(hosts)):
                self.tasks.append(subprocess.Popen(command(self.spec, job, index), stdout=self.log, stderr=self.log))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for task in self.tasks:
            task.kill()
            task.wait()


def tensorflow_command(spec, job, index):
    code = (
        "import sys, json, tensorflow.compat.v1 as tf;"
        "tf.train.Server(tf.train.ClusterSpec(json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3])).join()"
    )
    return [sys.executable, "-c", code, json.dumps(spec), job, str(index)]


def tftrain_command(program, folder):
    def command(spec, job, index):
        path = os.path.join(folder, f"cluster-{spec['ps'][0].split(':')[1]}.yaml")
        jobs = "".join(f"  {job}: [{', '.join(hosts)}]\n" for job, hosts in spec.items())
        # Once: tasks that are already there read it.
        if not os.path.exists(path):
            pathlib.Path(path).write_text("cluster:\n  mode: session\n" + jobs)
        return [program, "serve", "--config", path, "--job-name", job, "--task-index", str(index)]

    return command


def build(batch):
    """The graph: both towers read one placeholder each."""
    import tensorflow.compat.v1 as tf

    ps = "/job:ps/task:0"
    with tf.device(ps):
        step = tf.train.get_or_create_global_step()
        rate = tf.train.exponential_decay(0.1, step, 1000, 0.1, staircase=True)
        optimizer = tf.train.GradientDescentOptimizer(rate)

    def variable(name, shape, stddev=None, constant=0.0, seed=1):
        initial = tf.constant_initializer(constant)
        if stddev is not None:
            initial = tf.truncated_normal_initializer(stddev=stddev, seed=seed)
        with tf.device(ps):
            return tf.get_variable(name, shape, initializer=initial)

    def layer(scope, x, shape, stddev, constant, seed, decay=None, convolution=False):
        with tf.variable_scope(scope):
            weights = variable("weights", shape, stddev, seed=seed)
            biases = variable("biases", shape[-1:], constant=constant)
            if decay:
                tf.add_to_collection("decay", decay * tf.nn.l2_loss(weights))
            if convolution:
                return tf.nn.bias_add(tf.nn.conv2d(x, weights, [1, 1, 1, 1], padding="SAME"), biases)
            return tf.matmul(x, weights) + biases

    def tower(pictures, labels):
        pool = dict(ksize=[1, 3, 3, 1], strides=[1, 2, 2, 1], padding="SAME")
        norm = dict(depth_radius=4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
        h = tf.nn.relu(layer("conv1", pictures, [5, 5, 3, 64], 5e-2, 0.0, 11, convolution=True))
        h = tf.nn.lrn(tf.nn.max_pool(h, **pool), **norm)
        h = tf.nn.relu(layer("conv2", h, [5, 5, 64, 64], 5e-2, 0.1, 12, convolution=True))
        h = tf.nn.max_pool(tf.nn.lrn(h, **norm), **pool)
        h = tf.reshape(h, [tf.shape(h)[0], -1])
        h = tf.nn.relu(layer("local3", h, [6 * 6 * 64, 384], 0.04, 0.1, 13, decay=0.004))
        h = tf.nn.relu(layer("local4", h, [384, 192], 0.04, 0.1, 14, decay=0.004))
        logits = layer("softmax_linear", h, [192, 10], 1 / 192.0, 0.0, 15)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        right = tf.reduce_sum(tf.cast(tf.nn.in_top_k(logits, labels, 1), tf.int32))
        return tf.add_n([tf.reduce_mean(each)] + tf.get_collection("decay")), right

    feeds, gradients, losses, hits = [], [], [], []
    with tf.variable_scope(tf.get_variable_scope()):
        for i in range(2):
            tf.get_default_graph().clear_collection("decay")
            with tf.device(f"/job:worker/task:{i}"), tf.name_scope(f"tower_{i}"):
                pictures = tf.placeholder(tf.float32, [batch, 24, 24, 3])
                labels = tf.placeholder(tf.int32, [batch])
                loss, right = tower(pictures, labels)
                tf.get_variable_scope().reuse_variables()
                gradients.append(optimizer.compute_gradients(loss))
            feeds += [pictures, labels]
            losses.append(loss)
            hits.append(right)
    with tf.device(ps):
        mean = []
        for pairs in zip(*gradients):
            stacked = tf.concat([tf.expand_dims(g, 0) for g, _ in pairs], 0)
            mean.append((tf.reduce_mean(stacked, 0), pairs[0][1]))
        # Variables by reference are read when somebody looks: the losses first, or they are of either step.
        with tf.control_dependencies(losses + hits):
            applied = optimizer.apply_gradients(mean, global_step=step)
        averages = tf.train.ExponentialMovingAverage(0.9999, step)
        moved = averages.apply(tf.trainable_variables())
        with tf.control_dependencies([applied, moved]):
            train = tf.no_op(name="train")
        saver = tf.train.Saver(tf.global_variables())
        init = tf.global_variables_initializer()
    return feeds, train, losses, hits, init, saver


def client(target, steps, batch, save, restore):
    """Runs the steps; prints the losses and how long a step takes."""
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    feeds, train, losses, hits, init, saver = build(batch)
    draw = np.random.RandomState(5)
    seen, times = [], []
    with tf.Session(target) as session:
        if restore:
            saver.restore(session, restore)
        else:
            session.run(init)
        for _ in range(steps):
            values = []
            for _ in range(2):
                values += [draw.normal(size=(batch, 24, 24, 3)).astype(np.float32), draw.randint(0, 10, batch)]
            began = time.time()
            seen.append([float(v) for v in session.run([train] + losses + hits, dict(zip(feeds, values)))[1:3]])
            times.append(time.time() - began)
        if save:
            saver.save(session, save)
    print("RESULT", json.dumps({"losses": seen, "seconds": sorted(times)[len(times) // 2]}))


def run_client(cluster, steps, batch, save="", restore=""):
    words = ["--client", cluster.target, "--steps", str(steps), "--batch", str(batch), "--save", save, "--restore", restore]
    done = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        sys.exit(f"the client failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(lines[0][7:])


def compare(what, ours, theirs):
    worst = max(abs(a - b) for x, y in zip(ours["losses"], theirs["losses"]) for a, b in zip(x, y))
    print(f"{what}: losses {ours['losses'][0][0]:.4f} to {ours['losses'][-1][0]:.4f}, greatest difference {worst:.2e}")
    if not worst <= TOLERANCE:
        sys.exit(f"{what}: {ours['losses']}\nTensorFlow's servers: {theirs['losses']}")


def main():
    words = argparse.ArgumentParser()
    words.add_argument("tftrain", nargs="?")
    words.add_argument("--client")
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--batch", type=int, default=16)
    words.add_argument("--save")
    words.add_argument("--restore")
    words.add_argument("--checkpoint", action="store_true")
    args = words.parse_args()
    # The libraries that differ from run to run are left out.
    os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="2", TF_ENABLE_ONEDNN_OPTS="0")
    if args.client:
        return client(args.client, args.steps, args.batch, args.save, args.restore)
    with tempfile.TemporaryDirectory() as folder:
        by_us, by_them = os.path.join(folder, "ours-1"), os.path.join(folder, "theirs-1")
        save = args.checkpoint
        with Cluster(tensorflow_command, folder) as cluster:
            theirs = run_client(cluster, args.steps, args.batch, save=by_them if save else "")
        with Cluster(tftrain_command(args.tftrain, folder), folder) as cluster:
            ours = run_client(cluster, args.steps, args.batch, save=by_us if save else "")
            compare(f"{args.steps} steps", ours, theirs)
            print(f"a step took {ours['seconds']:.3f} s here and {theirs['seconds']:.3f} s on TensorFlow's servers")
            if save:
                from_theirs = run_client(cluster, 3, args.batch, restore=by_them)
                from_ours = run_client(cluster, 3, args.batch, restore=by_us)
                compare("3 steps after a checkpoint of either", from_ours, from_theirs)
        if save:
            with Cluster(tensorflow_command, folder) as cluster:
                compare("our checkpoint continued by TensorFlow", from_ours, run_client(cluster, 3, args.batch, restore=by_us))
            shown = subprocess.run([args.tftrain, "inspect", "checkpoint", by_them], stdout=subprocess.PIPE, text=True, check=True).stdout
            for name in ("conv1/weights/ExponentialMovingAverage [5, 5, 3, 64]", "global_step [] i64 20"):
                if args.steps == 20 and name not in shown:
                    sys.exit(f"inspect does not show {name}:\n{shown}")
            print(f"inspect checkpoint shows {len(shown.splitlines()) - 1} tensors")


if __name__ == "__main__":
    main()
