"""A worker of the articles' linear regressions, y = 5x + 8, on tf.compat.v1.

Without --target the process has a tf.train.Server of its own, as the articles have it."""

import argparse
import json

import numpy as np
import tensorflow.compat.v1 as tf

parser = argparse.ArgumentParser()
parser.add_argument("--cluster", required=True)
parser.add_argument("--task", type=int, required=True)
parser.add_argument("--target")
parser.add_argument("--logdir", required=True)
parser.add_argument("--article", type=int, choices=(2, 3), default=2)
parser.add_argument("--sync", action="store_true")
parser.add_argument("--resource", action="store_true")
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--rate", type=float, default=0.003)
args = parser.parse_args()

tf.disable_eager_execution()
if not args.resource:
    tf.disable_resource_variables()
cluster = tf.train.ClusterSpec(json.loads(args.cluster))
target = args.target or tf.train.Server(cluster, job_name="worker", task_index=args.task).target
chief, workers = args.task == 0, cluster.num_tasks("worker")
np.random.seed(args.task)
more = {}

with tf.device(tf.train.replica_device_setter(worker_device=f"/job:worker/task:{args.task}", cluster=cluster)):
    x, y = tf.placeholder(tf.float32), tf.placeholder(tf.float32)
    global_step = tf.train.get_or_create_global_step()
    w = tf.get_variable("weight", [1], initializer=tf.random_normal_initializer())
    b = tf.get_variable("bias", [1], initializer=tf.zeros_initializer())
    prediction = tf.multiply(x, w) + b
    cost = tf.square(y - prediction)
    if args.article == 3:
        tf.summary.histogram("prediction", prediction)
        cost = tf.reduce_mean(cost)
        tf.summary.scalar("loss", cost)
    optimizer = tf.train.GradientDescentOptimizer(args.rate)
    if args.sync:
        optimizer = tf.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=workers, total_num_replicas=workers)
    train = optimizer.minimize(cost, global_step=global_step)
    if args.sync:
        tokens, runner = optimizer.get_init_tokens_op(), optimizer.get_chief_queue_runner()
        more["local_init_op"] = optimizer.chief_init_op if chief else optimizer.local_step_init_op
        more["ready_for_local_init_op"] = optimizer.ready_for_local_init_op
    saver, summaries = tf.train.Saver(max_to_keep=1), tf.summary.merge_all()
    init = tf.global_variables_initializer()

supervisor = tf.train.Supervisor(is_chief=chief, logdir=args.logdir, init_op=init, summary_op=None, saver=saver,
                                 global_step=global_step, recovery_wait_secs=1, **more)


def loop(sess):
    step, own = sess.run(global_step), 0
    print("began at", step, flush=True)
    while step < args.steps:
        a = np.random.randn(1 if args.article == 2 else 8)
        feed = {x: a, y: 5 * a + np.random.randn(a.size) * 0.22 + 8}
        _, step = sess.run([train, global_step], feed)
        own += 1
        if summaries is not None and chief and own % 20 == 0:
            supervisor.summary_computed(sess, sess.run(summaries, feed), global_step=step)
    weight, bias = sess.run([w, b])
    print("ended at", step, "weight", weight[0], "bias", bias[0], flush=True)
    if chief:
        print("saved", saver.save(sess, args.logdir + "/model.ckpt", global_step=global_step), flush=True)


if args.article == 3:
    with supervisor.managed_session(target) as sess:
        loop(sess)
else:
    with supervisor.prepare_or_wait_for_session(target) as sess:
        if args.sync and chief:
            supervisor.start_queue_runners(sess, [runner])
            sess.run(tokens)
        loop(sess)
    try:
        supervisor.stop()
    except tf.errors.CancelledError:
        # The queue runner's step ends with the session; TensorFlow's own servers do the same.
        print("the queue runner was cancelled", flush=True)
