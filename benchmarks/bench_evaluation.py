"""ALBEF's retrieval evaluation, batched over queries, against a loop over queries as published: medians of three.

    PYTHONPATH=. python benchmarks/bench_evaluation.py [pictures] [captions a picture] [top k] [image size] [width]

The published way: encode everything, captions padded to 30 tokens and picture tokens kept; then, a query at a time,
first each picture and then each caption, copy the query beside its top k and pass all k pairs through the fusion
encoder. A pair that both sides ask for is passed twice, and a picture's keys and values are computed for each copy of
it. Ours pass each pair once. Both start from decoded pictures, take turns within each round, and must agree to 1e-5.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor

from components.evaluation.scoring import MATCH, Texts, rerank_itm, score_itc
from models.albef.config import AlbefConfig
from models.albef.model import Albef

MAX_TOKENS, SHORTEST, LONGEST = 30, 9, 18  # most of COCO's captions, [CLS] and [SEP] included
ROUNDS, GOAL, TOLERANCE = 3, 2.0, 1e-5
Found = tuple[Tensor, Tensor, Tensor]  # similarity (N, M), logits (N, M) and (M, N), zero outside the top k


@torch.inference_mode()
def per_query(model: Albef, pictures: Tensor, texts: Texts, top_k: int) -> Found:
    """Scores as the published evaluation goes about it."""
    encoded = [model.encode_image(some) for some in pictures.split(64)]
    image_tokens, image_features = (torch.cat(sides) for sides in zip(*encoded, strict=True))
    read = [
        model.encode_text(ids, mask)
        for ids, mask in zip(texts.input_ids.split(256), texts.attention_mask.split(256), strict=True)
    ]
    text_tokens, text_features = (torch.cat(sides) for sides in zip(*read, strict=True))
    similarity = image_features @ text_features.T
    image_to_text, text_to_image = torch.zeros_like(similarity), torch.zeros_like(similarity.T)
    for picture, row in enumerate(similarity):
        best = row.topk(min(top_k, len(texts))).indices
        copies = image_tokens[picture].expand(len(best), -1, -1)
        logits = model.match(copies, text_tokens[best], texts.attention_mask[best])
        image_to_text[picture, best] = logits[:, MATCH]
    for text, row in enumerate(similarity.T):
        best = row.topk(min(top_k, len(pictures))).indices
        copies = text_tokens[text].expand(len(best), -1, -1)
        logits = model.match(image_tokens[best], copies, texts.attention_mask[text].expand(len(best), -1))
        text_to_image[text, best] = logits[:, MATCH]
    return similarity, image_to_text, text_to_image


def batched(model: Albef, pictures: Tensor, texts: Texts, top_k: int) -> Found:
    """Scores as `evaluate` computes them."""
    itc = score_itc(model, pictures, texts)
    itm = rerank_itm(model, pictures, texts, itc, top_k=top_k)
    outside = (side.masked_fill(side.isinf(), 0.0) for side in (itm.image_to_text, itm.text_to_image))
    return itc.similarity, *outside


def main() -> None:
    given = [int(value) for value in sys.argv[1:]]
    pictures, each, top_k, size, width = given + [24, 5, 24, 384, 192][len(given) :]
    torch.manual_seed(0)
    config = AlbefConfig(
        image_size=size,
        vision_width=width,
        vision_depth=6,
        vision_heads=width // 64,
        text_width=width,
        text_layers=6,
        fusion_layers=3,
        text_heads=width // 64,
        text_intermediate=4 * width,
        init_std=0.05,  # wide enough for logits that differ
    )
    model = Albef(config).eval()
    lengths = torch.randint(SHORTEST, LONGEST + 1, (pictures * each, 1))
    mask = (torch.arange(MAX_TOKENS)[None] < lengths).long()
    ids = torch.randint(1000, config.vocab_size, (pictures * each, MAX_TOKENS)) * mask
    texts, images = Texts(ids, mask), torch.randn(pictures, 3, size, size)
    print(
        f"{pictures} pictures of {size} pixels, {len(texts)} captions, top {top_k}, width {width}, "
        f"{torch.get_num_threads()} threads"
    )
    times: dict[str, list[float]] = {"per query": [], "batched": []}
    for _ in range(ROUNDS):
        found = []
        for name, run in (("per query", per_query), ("batched", batched)):
            started = time.perf_counter()
            found.append(run(model, images, texts, top_k))
            times[name].append(time.perf_counter() - started)
        differences = [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]
        assert max(differences) < TOLERANCE, differences
    ratio = statistics.median(theirs / ours for theirs, ours in zip(*times.values(), strict=True))
    spread = float(found[0][1][found[0][1] != 0].std())
    for name, seconds in times.items():
        print(f"{name:10} {statistics.median(seconds):7.2f} s")
    print(
        f"batched takes {1 / ratio:.0%} of the time: {ratio:.1f} times as fast (goal {GOAL:.0f}); largest difference "
        f"of scores {max(differences):.1e} (goal {TOLERANCE:.0e}; their standard deviation is {spread:.2f})"
    )


if __name__ == "__main__":
    main()
