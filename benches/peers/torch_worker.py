"""The tutorial network in PyTorch, channels last; eager or compiled, bf16 by autocast."""
import itertools

import torch
import torch.nn.functional as F
from torch import nn

import worker


class Written(nn.Module):
    """Local response normalization by PyTorch's own function, whose alpha is divided by the window."""

    def forward(self, x):
        window = 2 * worker.RADIUS + 1
        return F.local_response_norm(x, window, alpha=worker.ALPHA * window, beta=0.75, k=1.0)


class Banded(nn.Module):
    """The same with the window of channels as a 1x1 convolution."""

    def __init__(self):
        super().__init__()
        self.register_buffer("band", torch.from_numpy(worker.band())[:, :, None, None])

    def forward(self, x):
        r = torch.rsqrt(1 + F.conv2d(x * x, self.band.to(x.dtype)))
        return x * (r * torch.sqrt(r))


class Network(nn.Module):
    """Pictures [batch, 3, 24, 24] to logits [batch, 10]."""

    def __init__(self, lrn):
        super().__init__()
        self.norm = {"as written": Written, "banded": Banded, "none": nn.Identity}[lrn]()
        self.conv1 = nn.Conv2d(3, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 64, 5, padding=2)
        self.local3 = nn.Linear(2304, 384)
        self.local4 = nn.Linear(384, 192)
        self.softmax_linear = nn.Linear(192, 10)
        with torch.no_grad():
            for name, value in worker.variables().items():
                layer, kind = name.split("/")
                value = torch.from_numpy(value)
                if value.dim() == 4:  # HWIO to OIHW
                    value = value.permute(3, 2, 0, 1)
                elif layer == "local3" and kind == "weights":  # rows by (y, x, channel) to (channel, y, x)
                    value = value.view(6, 6, 64, 384).permute(3, 2, 0, 1).reshape(384, 2304)
                elif value.dim() == 2:
                    value = value.T
                getattr(getattr(self, layer), "weight" if kind == "weights" else "bias").copy_(value)

    def forward(self, x):
        # ceil_mode pads even sizes as TensorFlow's SAME: nothing before, one after.
        x = self.norm(F.max_pool2d(F.relu(self.conv1(x)), 3, 2, ceil_mode=True))
        x = F.max_pool2d(self.norm(F.relu(self.conv2(x))), 3, 2, ceil_mode=True)
        x = F.relu(self.local3(x.flatten(1)))
        x = F.relu(self.local4(x))
        return self.softmax_linear(x)


def build(mode, lrn, dtype, batch_size):
    """A step of `eager` or `compiled`: forward, backward, SGD, moving averages; returns the loss."""
    network = Network(lrn).to(memory_format=torch.channels_last)
    trained = list(network.parameters())
    averages = [variable.detach().clone() for variable in trained]

    def loss_of(pictures, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = network(pictures)
        decay = network.local3.weight.square().sum() + network.local4.weight.square().sum()
        return F.cross_entropy(logits.float(), labels) + worker.WEIGHT_DECAY / 2 * decay

    if mode == "compiled":
        loss_of = torch.compile(loss_of)
    batches = [
        (torch.from_numpy(pictures).permute(0, 3, 1, 2), torch.from_numpy(labels).long())
        for pictures, labels in worker.batches(batch_size)
    ]
    source = itertools.cycle(batches)
    global_step = itertools.count(1)

    def step():
        loss = loss_of(*next(source))
        gradients = torch.autograd.grad(loss, trained)
        n = next(global_step)
        with torch.no_grad():
            torch._foreach_add_(trained, gradients, alpha=-worker.LEARNING_RATE)
            torch._foreach_lerp_(averages, trained, 1 - min(worker.EMA_DECAY, (1 + n) / (10 + n)))
        return loss.item()

    return step, sum(variable.numel() for variable in trained)


if __name__ == "__main__":
    torch.set_num_threads(worker.THREADS)
    worker.serve(torch.__version__, build)
