"""Two minutes on a GPU: bfloat16 steps of the paper's base model, plain, recomputed, compiled; memory and steps/s.

Says so and ends well where there is no GPU. ``python benchmarks/gpu_smoke.py [--batch N] [--cpu]``; ``--cpu`` runs the
same on a tiny model, to show that the script works.
"""

import argparse
import sys
import time

import torch

from components.training.blocks import prepare_blocks
from components.training.optimisers import Stepper, make_optimizer
from components.training.settings import TrainingParams
from models.albef.config import AlbefConfig
from models.albef.pretraining import AlbefPretraining

TINY = {"image_size": 32, "vision_width": 24, "vision_depth": 2, "vision_heads": 2, "vocab_size": 200}
TINY |= {"text_width": 24, "text_layers": 2, "fusion_layers": 1, "text_heads": 2, "text_intermediate": 48}
TINY |= {"embed_dim": 8, "queue_size": 64}
VARIANTS = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "float16, scaled": {"precision": "float16"},
    "bfloat16, recomputed": {"precision": "bfloat16", "activation_checkpointing": True},
    "bfloat16, compiled": {"precision": "bfloat16", "compile": True},
    "bfloat16, compiled, channels last": {"precision": "bfloat16", "compile": True, "channels_last": True},
}
WARM, TIMED = 3, 10


def measure(config, batch, device, changes):
    """Milliseconds a step, peak bytes, seconds of the first step, and the losses of the first and last step."""
    params = TrainingParams(clip_norm=5.0, **changes)
    torch.manual_seed(0)
    model = AlbefPretraining(config).to(device).train()
    if params.channels_last:
        model.to(memory_format=torch.channels_last)
    prepare_blocks(model, compiled=params.compile, recomputed=params.activation_checkpointing)
    stepper = Stepper(make_optimizer(model, params), params, device)
    generator = torch.Generator(device).manual_seed(0)
    images = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    if params.channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    ids = torch.randint(104, config.vocab_size, (batch, 25), device=device)
    ids[:, 0] = config.cls_id
    mask = torch.ones_like(ids)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, first, started = [], 0.0, time.perf_counter()
    for step in range(WARM + TIMED):
        if step in (1, WARM):
            wait(device)
            first = first or time.perf_counter() - started
            started = time.perf_counter()
        with stepper.autocast():
            out = model(images, ids, mask, 0.4, generator)
        stepper.backward(out.loss)
        stepper.step(1e-5)
        losses.append(out.loss.detach())
    wait(device)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    values = torch.stack(losses).tolist()
    if not all(map(torch.isfinite, torch.stack(losses))):
        raise SystemExit(f"gpu-smoke: a loss is no number: {values}")
    return (time.perf_counter() - started) / TIMED * 1000, peak, first, values[0], values[-1]


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64, help="pairs a step; the paper has 64 a GPU on 8 GPUs")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU, to show that the script works")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.cpu:
        print("gpu-smoke: skipped, this machine has no GPU that torch can use")
        sys.exit(0)
    device = torch.device("cpu" if arguments.cpu else "cuda")
    config = AlbefConfig.model_validate(TINY) if arguments.cpu else AlbefConfig()
    print(torch.cuda.get_device_name() if device.type == "cuda" else "CPU, a tiny model: the numbers mean nothing")
    print(f"torch {torch.__version__}, batch {arguments.batch}")
    print(f"{'':36} {'ms/step':>8} {'pairs/s':>8} {'peak GB':>8} {'first s':>8} {'loss':>16}")
    for name, changes in VARIANTS.items():
        step, peak, first, before, after = measure(config, arguments.batch, device, changes)
        speed = arguments.batch / step * 1000
        print(f"{name:36} {step:8.1f} {speed:8.0f} {peak / 1e9:8.1f} {first:8.1f} {before:8.2f}{after:8.2f}")
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
