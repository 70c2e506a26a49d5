"""HAT's similarity matrix, batched, against a loop over captions as the paper describes it.

    PYTHONPATH=. python benchmarks/bench_hat.py [pictures] [captions] [width]

Times go by the number of pairs, so that 200 pictures with 1,000 captions stand for 1,000 with 5,000.
"""

import sys
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from models.hat.cross_attention import Direction, cross_attention_scores

REGIONS = 49
GOAL = 10.0


def loop(regions: Tensor, words: Tensor, lengths: list[int], direction: str) -> Tensor:
    """Caption by caption: attention, the attended vectors, their cosines."""
    columns = []
    for caption, length in zip(words, lengths, strict=True):
        own = caption[:length].expand(len(regions), -1, -1).contiguous()  # (P, n, d)
        asking, other = (own, regions) if direction == "t2i" else (regions, own)
        similarity = F.leaky_relu(asking @ other.transpose(1, 2), 0.1)  # (P, asking, other)
        normed = similarity / (similarity.norm(dim=1, keepdim=True) + 1e-8)
        attended = (9.0 * normed).softmax(dim=2) @ other
        columns.append(F.cosine_similarity(asking, attended, dim=2, eps=1e-8).mean(dim=1))
    return torch.stack(columns, dim=1)


def main() -> None:
    pictures, captions, width = (int(value) for value in (*sys.argv[1:], 200, 1000, 768)[:3])
    torch.manual_seed(0)
    lengths = torch.randint(8, 22, (captions,)).tolist()
    regions, words = torch.randn(pictures, REGIONS, width), torch.randn(captions, max(lengths), width)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    print(
        f"{pictures} pictures x {captions} captions, {REGIONS} regions, width {width}, "
        f"{torch.get_num_threads()} threads"
    )
    with torch.inference_mode():
        directions: tuple[Direction, ...] = ("i2t", "t2i")
        for direction in directions:
            started = time.perf_counter()
            wanted = loop(regions, words, lengths, direction)
            middle = time.perf_counter()
            found = cross_attention_scores(regions, words, mask, direction)
            times = (middle - started, time.perf_counter() - middle)
            difference = float((wanted - found).abs().max())
            assert difference < 1e-5, difference
            whole = 5e6 / (pictures * captions)
            print(
                f"{direction}: loop {times[0]:.1f} s, batched {times[1]:.1f} s, {times[0] / times[1]:.1f} times "
                f"(goal {GOAL:.0f}); 1,000 x 5,000 would take {times[0] * whole:.0f} s and {times[1] * whole:.0f} s; "
                f"largest difference {difference:.1e}"
            )


if __name__ == "__main__":
    main()
