"""The tutorial network in JAX, one jitted function a step."""
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import worker


def normalize(x, lrn):
    """Local response normalization."""
    if lrn == "none":
        return x
    if lrn == "as written":
        window = (1, 1, 1, 2 * worker.RADIUS + 1)
        zero = np.zeros((), x.dtype)  # differentiable only where the first value is known
        sums = worker.ALPHA * lax.reduce_window(x * x, zero, lax.add, window, (1, 1, 1, 1), "SAME")
    else:
        sums = (x * x) @ jnp.asarray(worker.band(), x.dtype)
    r = lax.rsqrt(1 + sums)
    return x * (r * jnp.sqrt(r))


def pool(x):
    """3x3 maxima with stride 2."""
    low = np.array(-np.inf, x.dtype)
    return lax.reduce_window(x, low, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def loss_of(variables, pictures, labels, lrn, dtype):
    """The mean cross entropy with weight decay; variables stay f32."""
    cast = {name: value.astype(dtype) for name, value in variables.items()}

    def conv(x, name):
        y = lax.conv_general_dilated(
            x, cast[f"{name}/weights"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(y + cast[f"{name}/biases"])

    def dense(x, name):
        return x @ cast[f"{name}/weights"] + cast[f"{name}/biases"]

    x = normalize(pool(conv(pictures.astype(dtype), "conv1")), lrn)
    x = pool(normalize(conv(x, "conv2"), lrn)).reshape(-1, 2304)
    x = jax.nn.relu(dense(x, "local3"))
    x = jax.nn.relu(dense(x, "local4"))
    logs = jax.nn.log_softmax(dense(x, "softmax_linear").astype(jnp.float32))
    entropy = -jnp.take_along_axis(logs, labels[:, None], 1).mean()
    decay = sum((variables[f"{name}/weights"] ** 2).sum() for name in ("local3", "local4"))
    return entropy + worker.WEIGHT_DECAY / 2 * decay


def build(mode, lrn, dtype, batch_size):
    """A step of `jit`: forward, backward, SGD, moving averages; returns the loss."""
    del mode
    gradient = jax.value_and_grad(
        functools.partial(loss_of, lrn=lrn, dtype=jnp.bfloat16 if dtype == "bf16" else jnp.float32)
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train(variables, averages, n, pictures, labels):
        loss, gradients = gradient(variables, pictures, labels)
        decay = jnp.minimum(worker.EMA_DECAY, (1 + n) / (10 + n))
        variables = jax.tree.map(lambda v, g: v - worker.LEARNING_RATE * g, variables, gradients)
        averages = jax.tree.map(lambda a, v: v + decay * (a - v), averages, variables)
        return variables, averages, n + 1, loss

    def first():
        return {name: jnp.array(value) for name, value in worker.variables().items()}

    state = [first(), first(), jnp.float32(1)]
    source = itertools.cycle([tuple(map(jnp.asarray, batch)) for batch in worker.batches(batch_size)])

    def step():
        results = train(*state, *next(source))
        state[:] = results[:3]
        return results[3]

    return step, sum(value.size for value in state[0].values())


if __name__ == "__main__":
    worker.serve(jax.__version__, build)
