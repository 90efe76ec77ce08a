"""What a teacher may change in a script: six optimizers, references and resources, dropout, normalisation, embeddings, tf.cond.

usage: variations.py TFTRAIN

Each graph runs in TensorFlow itself and on a parameter server and two workers of tftrain, from the same seeds: losses must
agree. Then a MonitoredTrainingSession trains, is ended, and goes on from its checkpoint.
"""

import os
import sys
import tempfile

import cifar
import numpy as np

TOLERANCE = 1e-5
STEPS = 8
RATES = {"sgd": 0.1, "momentum": 0.05, "nesterov": 0.05, "adam": 0.01, "adagrad": 0.1, "rmsprop": 0.01}


def optimizer(tf, name):
    rate = RATES[name]
    return {
        "sgd": lambda: tf.train.GradientDescentOptimizer(rate),
        "momentum": lambda: tf.train.MomentumOptimizer(rate, 0.9),
        "nesterov": lambda: tf.train.MomentumOptimizer(rate, 0.9, use_nesterov=True),
        "adam": lambda: tf.train.AdamOptimizer(rate),
        "adagrad": lambda: tf.train.AdagradOptimizer(rate),
        "rmsprop": lambda: tf.train.RMSPropOptimizer(rate, momentum=0.5),
    }[name]()


def build(tf, name, resource):
    tf.reset_default_graph()
    tf.get_variable_scope().set_use_resource(resource)
    draw = np.random.RandomState(0)
    x = tf.constant(draw.normal(size=(16, 6)).astype(np.float32))
    y = tf.constant(draw.randint(0, 3, 16))
    w = tf.get_variable("w", [6, 8], initializer=tf.truncated_normal_initializer(stddev=0.5, seed=3))
    b = tf.get_variable("b", [8], initializer=tf.zeros_initializer())
    v = tf.get_variable("v", [8, 3], initializer=tf.random_normal_initializer(seed=4))
    words = tf.get_variable("words", [5, 6], initializer=tf.random_uniform_initializer(seed=8))
    x += tf.nn.embedding_lookup(words, tf.constant(draw.randint(0, 5, 16)))
    h = tf.nn.dropout(tf.nn.sigmoid(tf.nn.xw_plus_b(x, w, b)), rate=0.3, seed=5)
    h = tf.concat([h[:, :4], tf.tanh(h[:, 4:])], 1)
    mean, variance = tf.nn.moments(h, [0])
    logits = tf.matmul(tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3), v)
    p = tf.nn.softmax(logits)
    loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(labels=tf.one_hot(y, 3), logits=logits))
    loss += 0.01 * tf.reduce_max(tf.abs(w)) + tf.reduce_mean(tf.where(p > 0.5, p, tf.zeros_like(p)))
    loss += tf.cond(tf.reduce_sum(b) > 0, lambda: tf.reduce_sum(b * b), lambda: tf.constant(0.0))
    step = tf.train.get_or_create_global_step()
    chosen = optimizer(tf, name)
    pairs = chosen.compute_gradients(loss)
    clipped, _ = tf.clip_by_global_norm([g for g, _ in pairs], 1.0)
    right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
    # Variables by reference are read when somebody looks: the losses first, or they are of either step.
    with tf.control_dependencies([loss, right]):
        train = chosen.apply_gradients(zip(clipped, [v for _, v in pairs]), global_step=step)
    tf.summary.scalar("loss", loss)
    tf.summary.histogram("w", w)
    return loss, right, train, tf.global_variables_initializer(), tf.summary.merge_all()


def losses(tf, target, name, resource):
    loss, right, train, init, summary = build(tf, name, resource)
    with tf.Session(target) as session:
        session.run(init)
        seen = [session.run([loss, right, train])[:2] for _ in range(STEPS)]
        return np.array(seen), len(session.run(summary))


def main():
    os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        with cifar.Cluster(cifar.tftrain_command(sys.argv[1], folder), folder) as cluster:
            for name in RATES:
                for resource in (False, True):
                    (theirs, length), (ours, own) = (losses(tf, t, name, resource) for t in ("", cluster.target))
                    tf.Session.reset(cluster.target)
                    worst = np.abs(ours - theirs).max()
                    kind = "resources" if resource else "references"
                    print(f"{name}, {kind}: greatest difference {worst:.1e}")
                    if not worst <= TOLERANCE or length != own:
                        sys.exit(f"{name}, {kind}: {ours.tolist()} {own}, TensorFlow {theirs.tolist()} {length}")
            steps = []
            for last in (5, 9):
                loss, _, train, _, _ = build(tf, "momentum", False)
                hook = tf.train.StopAtStepHook(last_step=last)
                keep = dict(checkpoint_dir=os.path.join(folder, "run"), save_checkpoint_steps=3, save_summaries_steps=2)
                with tf.train.MonitoredTrainingSession(cluster.target, hooks=[hook], log_step_count_steps=0, **keep) as session:
                    steps.append(int(session.run(tf.train.get_global_step())))
                    while not session.should_stop():
                        session.run([loss, train])
                # What the servers hold is gone; the checkpoint is not.
                tf.Session.reset(cluster.target)
            print(f"MonitoredTrainingSession began at steps {steps}")
            if steps != [0, 5]:
                sys.exit("the second session did not go on from the checkpoint of the first")


if __name__ == "__main__":
    main()
