"""A client of GPUs that a task has: gpus.py TARGET. The task is /job:work/task:0; a small network trains there and on its CPU."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()
TARGET = sys.argv[1]
random = np.random.RandomState(0)
PICTURES, LABELS = random.randn(4, 8, 8, 3).astype("f"), random.randint(0, 10, 4)


def weights(name, shape):
    return tf.get_variable(name, initializer=(np.random.RandomState(1).randn(*shape) * 0.1).astype("f"))


def trained(device, soft):
    """The losses of some steps; all but the input is on `device`."""
    with tf.Graph().as_default(), tf.device("/job:work/task:0"):
        x, labels = tf.placeholder(tf.float32, [None, 8, 8, 3]), tf.placeholder(tf.int32, [None])
        with tf.device(device):
            y = tf.nn.conv2d(x, weights("conv" + device[-3:-2], [3, 3, 3, 8]), [1, 1, 1, 1], "SAME")
            y = tf.nn.relu(tf.nn.bias_add(y, weights("bias" + device[-3:-2], [8])))
            y = tf.nn.lrn(tf.nn.max_pool(y, [1, 3, 3, 1], [1, 2, 2, 1], "SAME"), 4, 1.0, 0.001 / 9.0, 0.75)
            logits = tf.matmul(tf.reshape(y, [-1, 128]), weights("dense" + device[-3:-2], [128, 10]))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
            step = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
        config = tf.ConfigProto(allow_soft_placement=soft, log_device_placement=True)
        with tf.Session(TARGET, config=config) as sess:
            sess.run(tf.global_variables_initializer())
            feed = {x: PICTURES, labels: LABELS}
            return np.array([sess.run([loss, step], feed)[0] for _ in range(10)])


with tf.Session(TARGET) as sess:
    for device in sess.list_devices():
        print(device.name, device.device_type, device.memory_limit_bytes)
cpu, gpu = trained("/cpu:0", False), trained("/gpu:1", True)
print("trained", "alike" if np.allclose(cpu, gpu, rtol=1e-4) and cpu[-1] < cpu[0] / 2 else (cpu, gpu))
with tf.Graph().as_default(), tf.device("/job:work/task:0/gpu:0"):
    kept = tf.matmul(tf.get_variable("kept", initializer=[[1.0, 2.0]]), [[3.0], [4.0]])
    with tf.Session(TARGET) as sess:
        sess.run(tf.global_variables_initializer())
        print("product", sess.run(kept))
    try:
        tf.Session(TARGET).run(tf.sin(1.0, name="wave"))
    except tf.errors.InvalidArgumentError as error:
        print(error.message)
