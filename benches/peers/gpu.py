#!/usr/bin/env python3
"""tftrain beside PyTorch on one GPU: whole training steps of the tutorial network and of ResNet-20.

    python benches/peers/gpu.py --tftrain target/release/tftrain --json gpu.json

PyTorch runs eager, compiled (torch.compile), and as recorded CUDA graphs, in f32, tf32 and bf16 (autocast), channels last; its pictures
lie on the card, and it does not read the loss back. tftrain runs `bench step` with its input. Needs torch with CUDA, and installs nothing:
what is missing is said and left out. `--device cpu` with small sizes tries the script out; its figures mean nothing.
"""
import argparse
import json
import platform
import statistics
import subprocess
import sys
import time

NETWORKS = {"cifar10": "tutorial network", "resnet": "ResNet-20"}
MODES = ["eager", "compile", "graphs"]
DTYPES = ["f32", "tf32", "bf16"]


def skip(what, why):
    print(f"SKIPPED: {what}: {why}", flush=True)


def make_networks(torch):
    """The networks as PyTorch users write them, with the layers and parameters of tftrain's."""
    nn, F = torch.nn, torch.nn.functional

    class Tutorial(nn.Module):
        side, momentum, average = 24, 0.0, 0.9999

        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 64, 5, padding=2), nn.Conv2d(64, 64, 5, padding=2)
            self.local3, self.local4 = nn.Linear(2304, 384), nn.Linear(384, 192)
            self.last = nn.Linear(192, 10)

        def forward(self, x):
            norm = lambda x: F.local_response_norm(x, 9, alpha=0.001, beta=0.75, k=1.0)
            pool = lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)
            x = norm(pool(F.relu(self.conv1(x))))
            x = pool(norm(F.relu(self.conv2(x))))
            return self.last(F.relu(self.local4(F.relu(self.local3(x.flatten(1))))))

        def decay(self):
            return 0.004 / 2 * (self.local3.weight.square().sum() + self.local4.weight.square().sum())

    class Block(nn.Module):
        def __init__(self, inputs, channels, stride):
            super().__init__()
            self.stride, self.lacking = stride, channels - inputs
            self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

        def forward(self, x):
            y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            if self.stride > 1:
                x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.lacking // 2, self.lacking - self.lacking // 2))
            return F.relu(x + y)

    class Residual(nn.Module):
        side, momentum, average = 32, 0.9, None

        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
            shapes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
            self.blocks, self.last = nn.Sequential(*[Block(*shape) for shape in shapes]), nn.Linear(64, 10)

        def forward(self, x):
            return self.last(self.blocks(self.norm(self.stem(x))).mean((2, 3)))

        def decay(self):
            return 2e-4 / 2 * sum(p.square().sum() for p in self.parameters() if p.dim() > 1)

    return {"cifar10": Tutorial, "resnet": Residual}


def build(torch, network, mode, dtype, device, batch):
    """A training step: forward, backward, SGD, moving averages. Returns it, and the number of parameters."""
    F = torch.nn.functional
    tf32 = dtype == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(1)
    net = network().to(device, memory_format=torch.channels_last)
    trained = list(net.parameters())
    averages = [p.detach().clone() for p in trained] if net.average else None
    velocities = [torch.zeros_like(p) for p in trained] if net.momentum else None
    pictures = torch.randn(batch, 3, net.side, net.side, device=device).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device=device)

    def loss_of(pictures, labels):
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            logits = net(pictures)
        return F.cross_entropy(logits.float(), labels) + net.decay()

    if mode == "compile":
        loss_of = torch.compile(loss_of)

    def step():
        loss = loss_of(pictures, labels)
        gradients = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            if velocities:
                torch._foreach_mul_(velocities, net.momentum)
                torch._foreach_add_(velocities, gradients)
                gradients = velocities
            torch._foreach_add_(trained, gradients, alpha=-0.01)
            if averages:
                torch._foreach_lerp_(averages, trained, 1 - net.average)
        return loss.detach()

    parameters = sum(p.numel() for p in trained)
    if mode != "graphs":
        return step, parameters
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay():
        graph.replay()
        return loss

    return replay, parameters


def timed(torch, step, device, steps, seconds):
    """Milliseconds of a step: the median of turns of `steps` with one wait each."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(max(3, steps // 4)):
        loss = step()
    wait()
    turns, begin = [], time.perf_counter()
    while len(turns) < 3 or (len(turns) < 25 and time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        wait()
        turns.append((time.perf_counter() - start) / steps * 1e3)
    if not torch.isfinite(loss):
        raise ArithmeticError(f"loss = {loss.item()}")
    return statistics.median(turns)


def pytorch(args, rows, deadline):
    try:
        import torch
    except (ImportError, OSError) as error:
        skip("PyTorch", error)
        return None
    if args.device == "cuda" and not torch.cuda.is_available():
        skip("PyTorch", f"torch {torch.__version__} sees no CUDA device")
        return None
    networks = make_networks(torch)
    for name in NETWORKS:
        for mode in args.modes:
            for dtype in args.dtypes:
                what = f"PyTorch {mode}, {dtype}, {NETWORKS[name]}"
                if mode == "graphs" and args.device != "cuda":
                    skip(what, "CUDA graphs need CUDA")
                    continue
                if time.monotonic() > deadline:
                    skip(what, "no time left")
                    continue
                try:
                    step, parameters = build(torch, networks[name], mode, dtype, args.device, args.batch)
                    ms = timed(torch, step, args.device, args.steps, args.seconds)
                except Exception as error:  # the other variants can still run
                    skip(what, f"{type(error).__name__}: {error}".splitlines()[0][:200])
                    continue
                add(rows, name, f"PyTorch {mode}", dtype, ms, args.batch, parameters)
    card = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "device": card}


def tftrain(args, rows, deadline):
    for name in NETWORKS:
        for dtype in args.dtypes:
            what = f"tftrain, {dtype}, {NETWORKS[name]}"
            if time.monotonic() > deadline:
                skip(what, "no time left")
                continue
            command = [args.tftrain, "bench", "step", "--json", "--model", name, "--batch-size", str(args.batch)]
            command += ["--num-batches", str(args.steps), "--set", f"precision={dtype}", "--set", "data.examples=5000"]
            command += ["--num-gpus", "1", "--set", "variables=replicated"] if args.device == "cuda" else []
            try:
                limit = max(10, deadline - time.monotonic())
                ended = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            except (OSError, subprocess.TimeoutExpired) as error:
                skip(what, error)
                continue
            if ended.returncode != 0:
                skip(what, f"exit {ended.returncode}: {(ended.stderr.strip().splitlines() or [''])[-1]}")
                continue
            result = json.loads(ended.stdout.strip().splitlines()[-1])
            add(rows, name, "tftrain", dtype, args.batch / result["images_per_sec"] * 1e3, args.batch, None)


def add(rows, network, who, dtype, ms, batch, parameters):
    row = {"network": network, "who": who, "dtype": dtype, "ms": ms, "examples_per_s": batch / ms * 1e3}
    rows.append({**row, "parameters": parameters} if parameters else row)
    print(f"{NETWORKS[network]:18} {who:18} {dtype:5} {ms:9.3f} ms {batch / ms * 1e3:12,.0f} examples/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tftrain", help="the program; left out without it")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50, help="steps of a turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="turns of a variant, together")
    parser.add_argument("--limit", type=float, default=240, help="seconds of the whole; what is over is left out")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, choices=DTYPES)
    parser.add_argument("--json", help="where the figures go")
    args = parser.parse_args()
    rows, start = [], time.monotonic()
    # tftrain gets a third at most, and PyTorch what is left.
    if args.tftrain:
        tftrain(args, rows, start + args.limit / 3)
    else:
        skip("tftrain", "no --tftrain")
    versions = pytorch(args, rows, start + args.limit)
    result = {"date": time.strftime("%Y-%m-%d"), "batch": args.batch, "versions": versions, "rows": rows}
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
