"""What the peers' workers share: first values, pictures, and the loop that answers run.py."""
import json
import os
import statistics
import sys
import time

import numpy as np

THREADS = int(sys.argv[1])
LEARNING_RATE = 0.1
WEIGHT_DECAY = 0.004
EMA_DECAY = 0.9999
# LRN as the tutorial writes it: x * (1 + ALPHA * sum of x^2 over RADIUS channels to either side)^-0.75
RADIUS = 4
ALPHA = 0.001 / 9

# name, shape (convolutions HWIO, dense [in, out]), standard deviation of the weights, value of the biases
LAYERS = [
    ("conv1", (5, 5, 3, 64), 0.05, 0.0),
    ("conv2", (5, 5, 64, 64), 0.05, 0.1),
    ("local3", (2304, 384), 0.04, 0.1),
    ("local4", (384, 192), 0.04, 0.1),
    ("softmax_linear", (192, 10), 1 / 192, 0.0),
]


def variables():
    """The network's first values by name, the same in every worker."""
    random = np.random.default_rng(0)
    values = {}
    for name, shape, deviation, bias in LAYERS:
        values[f"{name}/weights"] = (deviation * truncated_normal(random, shape)).astype(np.float32)
        values[f"{name}/biases"] = np.full(shape[-1], bias, np.float32)
    return values


def truncated_normal(random, shape):
    """Standard normals, drawn again while outside two standard deviations."""
    values = random.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = random.standard_normal(outside.sum())
    return values


def batches(batch_size, count=8):
    """Pictures [batch, 24, 24, 3] and labels [batch], the same in every worker."""
    random = np.random.default_rng(1)
    return [
        (
            random.standard_normal((batch_size, 24, 24, 3)).astype(np.float32),
            random.integers(0, 10, batch_size).astype(np.int32),
        )
        for _ in range(count)
    ]


def band(channels=64):
    """The window of LRN as a matrix [channels, channels]: LRN is x * (1 + x^2 @ band)^-0.75."""
    index = np.arange(channels)
    return (np.abs(index[:, None] - index) <= RADIUS).astype(np.float32) * np.float32(ALPHA)


def serve(version, build):
    """Answers each line of standard input, a JSON object, with one on standard output.

    `build(mode, lrn, dtype, batch_size)` returns a function that trains one step and returns the loss, and the number of
    parameters it trains.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    print(json.dumps({"version": version}), file=answers)
    built = {}
    for line in sys.stdin:
        asked = json.loads(line)
        key = (asked["mode"], asked["lrn"], asked["dtype"], asked["batch"])
        try:
            if key not in built:
                built[key] = build(*key)
            step, parameters = built[key]
            answer = {"parameters": parameters, **timed(step, asked["warmup"], asked["steps"])}
        except Exception as error:  # the other variants can still run
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(answer), file=answers)


def timed(step, warmup, steps):
    """The median milliseconds of a step, and the loss of each."""
    for _ in range(warmup):
        step()
    milliseconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(float(step()))
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(milliseconds), "losses": losses}
