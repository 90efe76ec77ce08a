#!/usr/bin/env python3
"""Golden values of a residual network of 8 layers, versions 1 and 2, computed by PyTorch in float64.

Run: python make_resnet.py > resnet.json      (torch 2.x and numpy; CPU)

Every input is a closed formula: wave(n, k)[i] = sqrt(3) * (2 u - 1) with u in [0, 1) from splitmix64 of i + (k << 32), rounded to f32.
Pictures are wave(4 * 32 * 32 * 3, 100), NHWC; the label of picture i is (7 i + 3) mod 10. Trained variable j (from 0, in the order of
their creation: convolution, then gamma and beta of the normalisation behind it, or in version 2 before it) starts at
  weights: sigma * wave(n, j + 1), sigma = sqrt(2 / fan-in), of the dense layer sqrt(1 / fan-in);
  gamma: 1 + 0.2 * wave(n, j + 1) in f32; beta and biases: 0.1 * wave(n, j + 1).
Moving means start at 0, moving variances at 1. Ten steps of momentum 0.9 at rate 0.01.
"""
import json
import sys

import numpy as np
import torch
import torch.nn.functional as F

BATCH, STEPS, RATE, MOMENTUM, DECAY, EPSILON, SHARE = 4, 10, 0.01, 0.9, 2e-4, 1e-5, 0.1


def wave(shape, k, scale=1.0):
    with np.errstate(over="ignore"):
        z = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(k << 32) + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in [(30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)]:
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    u = (z >> np.uint64(11)) / 2.0**53
    return (scale * np.sqrt(3.0) * (2 * u - 1)).astype(np.float32).reshape(shape)


def digest(tensor, samples=24):
    a = tensor.detach().double().numpy().ravel()
    at = np.linspace(0, a.size - 1, min(samples, a.size)).astype(int)
    return {
        "size": a.size, "sum": a.sum(), "l2": float(np.sqrt((a * a).sum())), "abs_max": float(np.abs(a).max()),
        "at": at.tolist(), "values": a[at].tolist(),
    }


class Network:
    """Makes its variables when they are first used, which gives them their numbers."""

    def __init__(self, version):
        self.version, self.variables, self.statistics = version, {}, {}

    def variable(self, name, shape, scale, shift=0.0):
        if name not in self.variables:
            value = np.float32(shift) + wave(shape, len(self.variables) + 1, scale)
            self.variables[name] = torch.tensor(value.astype(np.float64), requires_grad=True)
        return self.variables[name]

    def conv(self, name, x, channels, stride):
        fan_in = 9 * x.shape[1]
        w = self.variable(f"{name}/weights", (3, 3, x.shape[1], channels), float(np.sqrt(np.float32(2 / fan_in))))
        # SAME: with stride 2 on even sides one row and column of zeros, at the end.
        x = F.pad(x, (0, 1, 0, 1)) if stride == 2 else F.pad(x, (1, 1, 1, 1))
        return F.conv2d(x, w.permute(3, 2, 0, 1), stride=stride)

    def norm(self, name, x, training):
        c = x.shape[1]
        gamma = self.variable(f"{name}/batch_norm/gamma", (c,), 0.2, 1.0)
        beta = self.variable(f"{name}/batch_norm/beta", (c,), 0.1)
        mean_name, variance_name = f"{name}/batch_norm/moving_mean", f"{name}/batch_norm/moving_variance"
        moving = [self.statistics.setdefault(mean_name, torch.zeros(c, dtype=torch.float64)),
                  self.statistics.setdefault(variance_name, torch.ones(c, dtype=torch.float64))]
        # Updates the moving moments in place, with the variance of the population.
        return F.batch_norm(x, *moving, gamma, beta, training, SHARE, EPSILON)

    def block(self, name, x, channels, stride, training):
        short = x[:, :, ::stride, ::stride]
        lacking = channels - x.shape[1]
        short = F.pad(short, (0, 0, 0, 0, lacking // 2, lacking - lacking // 2))
        if self.version == 1:
            y = F.relu(self.norm(f"{name}/conv1", self.conv(f"{name}/conv1", x, channels, stride), training))
            y = self.norm(f"{name}/conv2", self.conv(f"{name}/conv2", y, channels, 1), training)
            return F.relu(short + y)
        y = self.conv(f"{name}/conv1", F.relu(self.norm(f"{name}/conv1", x, training)), channels, stride)
        y = self.conv(f"{name}/conv2", F.relu(self.norm(f"{name}/conv2", y, training)), channels, 1)
        return short + y

    def logits(self, x, training):
        x = self.norm("conv0", self.conv("conv0", x, 16, 1), training)
        x = F.relu(x) if self.version == 2 else x
        for stage, channels in enumerate([16, 32, 64]):
            x = self.block(f"stage{stage + 1}/block0", x, channels, 2 if stage else 1, training)
        if self.version == 2:
            x = F.relu(self.norm("last", x, training))
        x = x.mean((2, 3))
        w = self.variable("dense/weights", (64, 10), float(np.sqrt(np.float32(1 / 64))))
        return x @ w + self.variable("dense/biases", (10,), 0.1)


def train(version):
    pictures = torch.tensor(wave((BATCH, 32, 32, 3), 100).astype(np.float64)).permute(0, 3, 1, 2)
    labels = torch.tensor([(7 * i + 3) % 10 for i in range(BATCH)])
    network, velocities, out = Network(version), {}, {"losses": [], "cross_entropies": []}
    for step in range(STEPS):
        logits = network.logits(pictures, True)
        cross_entropy = F.cross_entropy(logits, labels)
        weights = [v for name, v in network.variables.items() if name.endswith("/weights")]
        loss = cross_entropy + DECAY / 2 * sum(w.square().sum() for w in weights)
        gradients = dict(zip(network.variables, torch.autograd.grad(loss, list(network.variables.values()))))
        if step == 0:
            out["logits"] = digest(logits)
            out["gradients"] = {name: digest(g) for name, g in gradients.items()}
        out["losses"].append(loss.item())
        out["cross_entropies"].append(cross_entropy.item())
        with torch.no_grad():
            for name, v in network.variables.items():
                velocities[name] = MOMENTUM * velocities.get(name, 0.0) + gradients[name]
                v -= RATE * velocities[name]
    out["variables_after"] = {name: digest(v) for name, v in {**network.variables, **network.statistics}.items()}
    out["evaluated_logits"] = digest(network.logits(pictures, False), 40)
    return out


if __name__ == "__main__":
    settings = {"depth": 8, "batch": BATCH, "rate": RATE, "momentum": MOMENTUM, "torch": torch.__version__.split("+")[0]}
    json.dump({"settings": settings, "v1": train(1), "v2": train(2)}, sys.stdout, indent=1)
    print()
