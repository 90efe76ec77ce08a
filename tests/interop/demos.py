"""The articles' demonstrations of devices and variables, on tf.compat.v1: demos.py TARGET NAME [soft]."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
tf.disable_control_flow_v2()
target, name = sys.argv[1:3]
config = tf.ConfigProto(log_device_placement=True, allow_soft_placement="soft" in sys.argv)


def session():
    return tf.Session(target, config=config)


def addition(device=None):
    with tf.device(device):
        return tf.constant([2], name="var_a"), tf.constant([3], name="var_b")


def clients_demo():
    np.random.seed(0)
    with tf.device("/job:ps/task:0"):
        x = tf.constant(np.random.rand(100).astype(np.float32))
    with tf.device("/job:work/task:1"):
        y = x * 0.1 + 0.3
    with session() as sess:
        print(sess.run(y))


def variables(resource):
    (tf.enable_resource_variables if resource else tf.disable_resource_variables)()
    with tf.device("/job:ps/task:0"):
        first = tf.Variable([2.0, 3.0], name="weights_1")
    with tf.device("/job:ps/task:1"):
        second = tf.Variable([10.0, 20.0], name="weights_2")
    with tf.device("/job:work/task:1"):
        product = first * second
        update = tf.assign_add(first, product)
    with session() as sess:
        try:
            sess.run(product)
        except tf.errors.FailedPreconditionError as error:
            print("UNINIT", type(error).__name__, error)
        sess.run(tf.global_variables_initializer())
        print(sess.run(update))
        print(sess.run(update))
        print(sess.run(product))


def partial():
    p, r = tf.placeholder(tf.float32, []), tf.placeholder(tf.float32, [])
    q = p + 1.0
    s = q * r
    with session() as sess:
        handle = sess.partial_run_setup([q, s], [p, r])
        print(sess.partial_run(handle, q, {p: 2.0}))


def devices():
    with session() as sess:
        for device in sess.list_devices():
            print(device.name, device.device_type)


def callable_():
    a, b = addition()
    with session() as sess:
        run = sess.make_callable(a + b)
        print(run(), run())


def reset():
    a, b = addition()
    total = a + b
    sess = session()
    print(sess.run(total))
    tf.Session.reset(target)
    try:
        print(sess.run(total))
    except tf.errors.AbortedError as error:
        print(type(error).__name__, error)


def run(*fetches):
    with session() as sess:
        for fetch in fetches:
            print(sess.run(fetch))


def plain(of_operands=None, of_sum=None):
    a, b = addition(of_operands)
    with tf.device(of_sum):
        run(a + b)


def bad_variable():
    with tf.device("/gpu:0"):
        a = tf.Variable([2], name="var_a", dtype=tf.int32, use_resource=False)
        run(a + 1)


def fed():
    """What a feed may be: any tensor, of its type and shape."""
    x = tf.placeholder(tf.float32, [None, 2], name="x")
    middle = tf.identity(x * 2.0, name="middle")
    end = middle + 1.0
    with session() as sess:
        print(sess.run(end, {x: [[1, 2]]}).tolist(), sess.run(end, {middle: [[5, 6]]}).tolist())
        print(sess.run([x, end], {x: np.zeros([0, 2])})[1].shape)
        try:
            sess.run(end)
        except tf.errors.InvalidArgumentError as error:
            print(type(error).__name__, "You must feed a value" in str(error))


def unknown():
    run(tf.raw_ops.Bincount(arr=[1], size=2, weights=[0]))


def branches():
    flag = tf.placeholder(tf.bool, [])
    with tf.device("/job:ps/task:0"):
        value = tf.constant(3.0)
    with tf.device("/job:work/task:1"):
        taken = tf.cond(flag, lambda: value * 2.0, lambda: value + 100.0)
    with session() as sess:
        print(sess.run(taken, {flag: True}), sess.run(taken, {flag: False}))


{
    "demo01": clients_demo,
    "plain": plain,
    "cpu": lambda: plain("/cpu:0", "/cpu:0"),
    "gpu": lambda: plain("/cpu:0", "/gpu:0"),
    "badjob": lambda: plain("/job:nosuch/task:0", "/job:nosuch/task:0"),
    "badgpu": bad_variable,
    "var": lambda: variables(False),
    "resvar": lambda: variables(True),
    "hello": lambda: run(tf.constant("Hello, distributed TensorFlow!")),
    "devices": devices,
    "partial": partial,
    "callable": callable_,
    "reset": reset,
    "fed": fed,
    "unknown": unknown,
    "branches": branches,
}[name]()
