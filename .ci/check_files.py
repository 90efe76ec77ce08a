"""Reads what a run wrote with the programs it is meant for: TensorBoard and the safetensors package.

usage: check_files.py TRAIN_DIR STEPS
"""
import json
import pathlib
import sys

from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

directory, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])

events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
events.Reload()
tags = events.Tags()
for scalar in ["total_loss", "total_loss (raw)", "learning_rate", "examples_per_sec", "conv1/sparsity", "Precision @ 1"]:
    assert scalar in tags["scalars"], (scalar, tags["scalars"])
for histogram in ["conv1/activations", "conv1/weights", "conv1/weights/gradients", "softmax_linear/biases"]:
    assert histogram in tags["histograms"], (histogram, tags["histograms"])
assert any(tag.startswith("images/image") for tag in tags["images"]), tags["images"]
losses = events.Scalars("total_loss (raw)")
assert [e.step for e in losses][:3] == [0, 10, 20] and losses[0].value > 4 > losses[-1].value, losses
histogram = events.Histograms("local3/weights")[-1].histogram_value
assert histogram.num == 2304 * 384 and abs(sum(histogram.bucket) - histogram.num) < 1, histogram
rows = [json.loads(line) for line in open(directory / "metrics.jsonl")]
assert [r["step"] for r in rows if r["kind"] == "step"][-1] == steps - 1, rows[-1]

state = (directory / "checkpoint").read_text().splitlines()
name = state[0].split('"')[1]
assert state[0].startswith("model_checkpoint_path:") and name == f"model.ckpt-{steps}.safetensors", state
with safe_open(directory / name, framework="numpy") as checkpoint:
    shapes = {key: tuple(checkpoint.get_slice(key).get_shape()) for key in checkpoint.keys()}
    assert shapes["local3/weights"] == (2304, 384) and shapes["conv1/weights"] == (5, 5, 3, 64), shapes
    assert shapes["conv1/weights/ExponentialMovingAverage"] == (5, 5, 3, 64), shapes
    assert int(checkpoint.get_tensor("global_step")) == steps
    assert abs(float(checkpoint.get_tensor("conv1/weights").std()) - 0.044) < 0.03
    metadata = checkpoint.metadata()
assert metadata["model"] == "cifar10" and metadata["position"] == str(128 * steps), metadata
print(f"TensorBoard read {len(tags['scalars'])} scalars and {len(tags['histograms'])} histograms; "
      f"safetensors read {len(shapes)} tensors")
