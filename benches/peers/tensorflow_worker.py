"""The tutorial network in TensorFlow, as a graph run by a session."""
import itertools

import tensorflow as tf

import worker

tf1 = tf.compat.v1


def normalize(x, lrn):
    """Local response normalization; the kernel "as written" has no bfloat16 and computes in f32 there."""
    if lrn == "none":
        return x
    if lrn == "as written":
        y = tf.nn.lrn(tf.cast(x, tf.float32), worker.RADIUS, bias=1.0, alpha=worker.ALPHA, beta=0.75)
        return tf.cast(y, x.dtype)
    band = tf.constant(worker.band()[None, None])
    r = tf.math.rsqrt(1 + tf.nn.conv2d(x * x, tf.cast(band, x.dtype), 1, "SAME"))
    return x * (r * tf.sqrt(r))


def loss_of(variables, pictures, labels, lrn, dtype):
    """The mean cross entropy with weight decay; variables stay f32."""

    def weights(name):
        return tf.cast(variables[f"{name}/weights"], dtype)

    def biases(name):
        return tf.cast(variables[f"{name}/biases"], dtype)

    def conv(x, name):
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weights(name), 1, "SAME"), biases(name)))

    def dense(x, name):
        return tf.matmul(x, weights(name)) + biases(name)

    x = conv(tf.cast(pictures, dtype), "conv1")
    x = normalize(tf.nn.max_pool2d(x, 3, 2, "SAME"), lrn)
    x = normalize(conv(x, "conv2"), lrn)
    x = tf.reshape(tf.nn.max_pool2d(x, 3, 2, "SAME"), [-1, 2304])
    x = tf.nn.relu(dense(x, "local3"))
    x = tf.nn.relu(dense(x, "local4"))
    logits = tf.cast(dense(x, "softmax_linear"), tf.float32)
    entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    decay = sum(tf.nn.l2_loss(variables[f"{name}/weights"]) for name in ("local3", "local4"))
    return tf.reduce_mean(entropy) + worker.WEIGHT_DECAY * decay


def build(mode, lrn, dtype, batch_size):
    """A step of `session`: forward, backward, SGD, moving averages; returns the loss."""
    del mode
    batches = worker.batches(batch_size)
    with tf.Graph().as_default():
        pictures = tf1.placeholder(tf.float32, batches[0][0].shape)
        labels = tf1.placeholder(tf.int32, batches[0][1].shape)
        variables = {
            name: tf1.get_variable(name, initializer=tf.constant(value)) for name, value in worker.variables().items()
        }
        trained = list(variables.values())
        global_step = tf1.train.get_or_create_global_step()
        loss = loss_of(variables, pictures, labels, lrn, tf.bfloat16 if dtype == "bf16" else tf.float32)
        optimizer = tf1.train.GradientDescentOptimizer(worker.LEARNING_RATE)
        update = optimizer.minimize(loss, global_step=global_step, var_list=trained)
        with tf1.control_dependencies([update]):
            average = tf1.train.ExponentialMovingAverage(worker.EMA_DECAY, global_step).apply(trained)
        threads = tf1.ConfigProto(
            intra_op_parallelism_threads=worker.THREADS, inter_op_parallelism_threads=worker.THREADS
        )
        session = tf1.Session(config=threads)
        session.run(tf1.global_variables_initializer())
        run = session.make_callable([loss, average], feed_list=[pictures, labels])
    source = itertools.cycle(batches)
    parameters = sum(variable.shape.num_elements() for variable in trained)
    return lambda: run(*next(source))[0], parameters


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(worker.THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(worker.THREADS)
    worker.serve(tf.__version__, build)
