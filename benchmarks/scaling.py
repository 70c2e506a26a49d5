"""The plan for 14M pairs and 30 epochs on 8, 64 and 256 GPUs, as docs/scaling.md explains it: prints its tables.

What can be counted is counted from the models themselves, on torch's meta device. What must be measured is an argument
with an assumed default: ``python benchmarks/scaling.py --pairs-per-second 160 --picture-kb 40``.
"""

import argparse
import math

import torch

from models.albef.config import AlbefConfig
from models.albef.pretraining import AlbefPretraining

FLOAT32, BFLOAT16 = 4, 2
GPUS_PER_NODE = 8


def count(config):
    """Parameters of the student, of the teacher, and numbers in the queues."""
    with torch.device("meta"):
        model = AlbefPretraining(config)
    student = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    teacher = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    return student, teacher, 2 * config.embed_dim * config.queue_size


def activations(config, pairs, tokens):
    """Bytes that the student keeps for the backward pass, in bfloat16 and with fused attention.

    About 34 bytes a token and unit of width in each block (Korthikanti et al. 2022, without the attention matrix).
    """
    image = config.vision_depth * config.image_tokens * config.vision_width
    # ITM reads 3 texts a pair through the fusion layers, MLM one more; both texts go through the text-only layers
    text = (2 * config.text_only_layers + 4 * config.fusion_layers) * tokens * config.text_width
    keys = 4 * config.fusion_layers * config.image_tokens * 2 * config.text_width / 34  # cross-attention's, beside
    return pairs * (image + text + keys) * 34


def recomputed(config, pairs, tokens):
    """The same when only the blocks' inputs are kept, and one block at a time is computed anew."""
    image = config.vision_depth * config.image_tokens * config.vision_width
    text = (2 * config.text_only_layers + 4 * config.fusion_layers) * tokens * config.text_width
    one = config.image_tokens * config.vision_width * 34
    return pairs * ((image + text) * BFLOAT16 + one)


def flops(config, tokens):
    """Floating point operations of one pair's step: 2 a weight and token forward, twice that backward."""
    mlp = 2 * config.vision_width * config.vision_mlp_ratio * config.vision_width
    image = config.vision_depth * (4 * config.vision_width**2 + mlp) * config.image_tokens
    own = 4 * config.text_width**2 + 2 * config.text_width * config.text_intermediate
    cross = 2 * config.text_width**2 * tokens + 2 * config.text_width * config.vision_width * config.image_tokens
    texts = 2 * config.text_only_layers * own * tokens + 4 * config.fusion_layers * (own * tokens + cross)
    vocabulary = config.vocab_size * config.text_width * tokens * config.mlm_probability
    teacher = image + 2 * config.text_only_layers * own * tokens + config.fusion_layers * (own * tokens + cross)
    return 2 * (3 * (image + texts + vocabulary) + teacher + vocabulary)


def row(gpus, config, options):
    student, teacher, queue = count(config)
    batch = options.batch_per_gpu * gpus
    steps = options.pairs // batch * options.epochs
    compute = options.batch_per_gpu / options.pairs_per_second
    gradient = student * FLOAT32
    # ring all-reduce: each GPU sends and receives 2 (n - 1) / n of the gradient
    moved = 2 * (gpus - 1) / gpus * gradient
    bandwidth = options.nvlink_gbytes if gpus <= GPUS_PER_NODE else options.network_gbits / 8
    reduce = moved / (bandwidth * 1e9)
    hidden = min(reduce, 2 / 3 * compute)  # DDP overlaps the reduction with the backward pass, two thirds of a step
    step = compute + reduce - hidden
    read = batch * options.picture_kb * 1e3
    checkpoint = (student * 3 + teacher + queue) * FLOAT32
    memory = (student * 4 + teacher + queue) * FLOAT32
    kept = activations(config, options.batch_per_gpu, options.tokens)
    small = recomputed(config, options.batch_per_gpu, options.tokens)
    gathered = batch * (2 * config.embed_dim + 2) * FLOAT32
    return {
        "GPUs": f"{gpus}",
        "nodes": f"{math.ceil(gpus / GPUS_PER_NODE)}",
        "pairs a step": f"{batch}",
        "steps": f"{steps}",
        "seconds a step": f"{step:.2f}",
        "of it waiting for gradients": f"{(step - compute) / step:.0%}",
        "hours in all": f"{steps * step / 3600:.0f}",
        "GPU-hours": f"{steps * step / 3600 * gpus:.0f}",
        "read a step, MB": f"{read / 1e6:.0f}",
        "read a second, MB": f"{read / step / 1e6:.0f}",
        "read a second and node, MB": f"{read / step / 1e6 / math.ceil(gpus / GPUS_PER_NODE):.0f}",
        "loader cores a GPU": f"{options.batch_per_gpu / step / options.loader_per_core:.1f}",
        "gradient a GPU sends, MB": f"{moved / 1e6:.0f}",
        "features gathered a GPU, MB": f"{gathered / 1e6:.2f}",
        "weights, Adam, teacher, queues, GB a GPU": f"{memory / 1e9:.1f}",
        "activations, GB a GPU": f"{kept / 1e9:.1f}",
        "activations recomputed, GB a GPU": f"{small / 1e9:.1f}",
        "a checkpoint, GB": f"{checkpoint / 1e9:.1f}",
        "queue turns over every, steps": f"{config.queue_size / batch:.0f}",
        "learning rate's warm-up, share": f"{options.warmup / steps:.1%}",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--pairs", type=int, default=14_000_000, help="picture-caption pairs (default %(default)s)")
    add("--epochs", type=int, default=30)
    add("--gpus", type=int, nargs="+", default=[8, 64, 256])
    add("--batch-per-gpu", type=int, default=64, help="64 in the paper, on 8 GPUs")
    add("--tokens", type=int, default=25, help="longest caption, tokens")
    add("--picture-kb", type=float, default=40, help="a stored picture; assumed, see data/report of your shards")
    add("--pairs-per-second", type=float, default=160, help="of one GPU; assumed, measure with make gpu-smoke")
    add(
        "--loader-per-core",
        type=float,
        default=100,
        help="pictures a core reads a second; benchmarks/bench_training.py",
    )
    add("--nvlink-gbytes", type=float, default=150, help="all-reduce within a node, GB/s; assumed")
    add("--network-gbits", type=float, default=50, help="between nodes, for each GPU, Gbit/s; assumed")
    add("--warmup", type=int, default=2000)
    options = parser.parse_args()
    config = AlbefConfig()
    student, teacher, queue = count(config)
    print(f"student {student / 1e6:.1f}M parameters, teacher {teacher / 1e6:.1f}M, queues {queue / 1e6:.1f}M numbers")
    print(f"{flops(config, options.tokens) / 1e9:.0f} GFLOP a pair and step\n")
    rows = [row(gpus, config, options) for gpus in options.gpus]
    print("| | " + " | ".join(one["GPUs"] + " GPUs" for one in rows) + " |")
    print("|---" * (len(rows) + 1) + "|")
    for name in list(rows[0])[1:]:
        print(f"| {name} | " + " | ".join(one[name] for one in rows) + " |")


if __name__ == "__main__":
    main()
