"""y = 5x + 8 in TensorFlow: a session's loop that feeds one example a step.

usage: line_worker.py THREADS HOW WARMUP STEPS, where HOW is `run` (`session.run` with a feed_dict, as tutorials write it) or
`callable` (what it costs at least); prints the median milliseconds of a step and the line that was found as JSON.
"""
import json
import sys

import numpy as np
import tensorflow as tf

import worker

tf1 = tf.compat.v1


def main(how, warmup, steps):
    random = np.random.default_rng(0)
    xs = random.uniform(-1, 1, 1000)
    points = list(zip(xs.tolist(), (5 * xs + 8 + 0.22 * random.standard_normal(1000)).tolist()))
    with tf.Graph().as_default():
        x = tf1.placeholder(tf.float32)
        y = tf1.placeholder(tf.float32)
        weight = tf1.get_variable("weight", [1], tf.float32, tf1.random_normal_initializer())
        bias = tf1.get_variable("bias", [1], tf.float32, tf1.zeros_initializer())
        global_step = tf1.train.get_or_create_global_step()
        loss = tf.reduce_mean(tf.square(y - (tf.multiply(x, weight) + bias)))
        update = tf1.train.GradientDescentOptimizer(0.01).minimize(loss, global_step=global_step)
        threads = tf1.ConfigProto(
            intra_op_parallelism_threads=worker.THREADS, inter_op_parallelism_threads=worker.THREADS
        )
        session = tf1.Session(config=threads)
        session.run(tf1.global_variables_initializer())
        run = session.make_callable([update, loss], feed_list=[x, y])
        numbers = iter(range(warmup + steps))

        def step():
            px, py = points[next(numbers) % len(points)]
            if how == "callable":
                return run(px, py)[1]
            return session.run([update, loss], feed_dict={x: px, y: py})[1]

        ms = worker.timed(step, warmup, steps)["ms"]
        found = [float(value[0]) for value in session.run([weight, bias])]
    print(json.dumps({"ms": ms, "line": found}))


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
