"""The tutorial's distortion of CIFAR-10 by TensorFlow and PyTorch: how many pictures a second come out, batches of 128.

usage: input_worker.py THREADS HOW WARMUP BATCHES [DIR]; prints the rate as JSON. Without a folder the pictures are noise.
HOW: `tf.data-pictures` (a map per picture, as the tutorial has it), `tf.data-batches` (whole batches), `torch-batches` (whole
batches in the calling process), `torch-compiled` (the same, compiled), `torch-loader` (the same in DataLoader's workers).
"""
import glob
import itertools
import json
import os
import sys
import time

import numpy as np

import worker

BATCH = 128
RECORD = 3073
CROP = 24
AREA = CROP * CROP * 3


def records(folder):
    """All records [pictures, 3073] of the training set."""
    if folder is None:
        return np.random.default_rng(0).integers(0, 256, (10_000, RECORD), np.uint8)
    files = sorted(glob.glob(os.path.join(folder, "data_batch_*.bin")))
    return np.concatenate([np.fromfile(file, np.uint8).reshape(-1, RECORD) for file in files])


def with_tensorflow(how, folder):
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(worker.THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(worker.THREADS)

    def of_picture(record):
        label = tf.cast(record[0], tf.int32)
        x = tf.cast(tf.transpose(tf.reshape(record[1:], [3, 32, 32]), [1, 2, 0]), tf.float32)
        x = tf.image.random_flip_left_right(tf.image.random_crop(x, [CROP, CROP, 3]))
        x = tf.image.random_contrast(tf.image.random_brightness(x, 63), 0.2, 1.8)
        return tf.image.per_image_standardization(x), label

    def of_batch(batch):
        labels = tf.cast(batch[:, 0], tf.int32)
        x = tf.reshape(batch[:, 1:], [BATCH, 3, 32, 32])
        rows, columns = (tf.random.uniform([BATCH, 1], 0, 9, tf.int32) + tf.range(CROP) for _ in range(2))
        flip = tf.random.uniform([BATCH, 1], 0, 2, tf.int32) > 0
        columns = tf.where(flip, columns[:, ::-1], columns)
        x = tf.gather(tf.transpose(x, [0, 2, 3, 1]), rows, axis=1, batch_dims=1)
        x = tf.cast(tf.gather(x, columns, axis=2, batch_dims=1), tf.float32)
        x += tf.random.uniform([BATCH, 1, 1, 1], -63, 63)
        mean = tf.reduce_mean(x, [1, 2], keepdims=True)
        x = (x - mean) * tf.random.uniform([BATCH, 1, 1, 1], 0.2, 1.8) + mean
        mean = tf.reduce_mean(x, [1, 2, 3], keepdims=True)
        deviation = tf.math.reduce_std(x, [1, 2, 3], keepdims=True)
        return (x - mean) / tf.maximum(deviation, AREA**-0.5), labels

    examples = tf.data.Dataset.from_tensor_slices(records(folder)).shuffle(20_000).repeat()
    if how == "tf.data-pictures":
        examples = examples.map(of_picture, worker.THREADS, deterministic=False).batch(BATCH, True)
    else:
        examples = examples.batch(BATCH, True).map(of_batch, worker.THREADS, deterministic=False)
    options = tf.data.Options()
    options.threading.private_threadpool_size = worker.THREADS
    return iter(examples.prefetch(2 * worker.THREADS).with_options(options))


def with_torch(how, folder):
    import torch

    torch.set_num_threads(worker.THREADS)
    data = records(folder)
    labels = torch.from_numpy(data[:, 0].astype(np.int64))
    pictures = torch.from_numpy(data[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy())
    line = torch.arange(CROP)

    def distort(x):
        count = len(x)
        rows, columns = (torch.randint(0, 9, (count, 1)) + line for _ in range(2))
        columns = torch.where(torch.rand(count, 1) < 0.5, columns.flip(1), columns)
        x = x[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]].float()
        x = x + (torch.rand(count, 1, 1, 1) * 126 - 63)
        mean = x.mean((1, 2), keepdim=True)
        x = (x - mean) * (torch.rand(count, 1, 1, 1) * 1.6 + 0.2) + mean
        deviation = x.std((1, 2, 3), correction=0, keepdim=True)
        return (x - x.mean((1, 2, 3), keepdim=True)) / deviation.clamp_min(AREA**-0.5)

    if how == "torch-compiled":
        distort = torch.compile(distort, dynamic=False)

    class Batches(torch.utils.data.Dataset):
        """Whole batches, by the indices of their pictures."""

        def __getitem__(self, chosen):
            return distort(pictures[chosen]), labels[chosen]

    def chosen():
        while True:
            order = torch.randperm(len(pictures))
            yield from (order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH))

    if how == "torch-loader":
        # Each worker has a thread, as DataLoader sets.
        return iter(torch.utils.data.DataLoader(Batches(), None, sampler=chosen(), num_workers=worker.THREADS))
    return map(Batches().__getitem__, chosen())


def main(how, warmup, batches, folder):
    source = (with_tensorflow if how.startswith("tf") else with_torch)(how, folder)
    for _ in itertools.islice(source, warmup):
        pass
    start = time.perf_counter()
    for pictures, _ in itertools.islice(source, batches):
        assert tuple(pictures.shape) == (BATCH, CROP, CROP, 3), pictures.shape
    rate = batches * BATCH / (time.perf_counter() - start)
    pictures = np.asarray(pictures)
    mean, deviation = float(pictures.mean()), float(pictures.std())
    assert abs(mean) < 1e-3 and abs(deviation - 1) < 1e-2, (mean, deviation)
    print(json.dumps({"images_per_sec": rate}), flush=True)
    del source  # ends its processes
    os._exit(0)  # and its threads


if __name__ == "__main__":
    main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] if len(sys.argv) > 5 else None)
