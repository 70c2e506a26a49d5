"""VITR's time per query with and without turbo, at the sizes of the paper's table 5.

    PYTHONPATH=. python benchmarks/bench_turbo.py [captions] [pictures] [queries]

9,582 captions and 2,600 pictures, 49 regions of 2048 values, words of 512; features are drawn at random, as time does
not depend on them. Without turbo a query is scored with the whole other side, none left out; with it, with 200 of it.
Both count the query's global vector, reading and reasoning over what is scored, and the sorting; turbo also its search.
The encoders are at rest on both sides: their outputs are at hand, as the stage `features` keeps them. Medians; the two
ways of a query are timed one after the other, so that a busy machine slows both.
"""

import sys
import time

import numpy as np
import torch
from torch import Tensor

from components.evaluation.tower_scoring import embed_all
from components.evaluation.tower_search import TowerSearch
from components.evaluation.turbo import query_times
from components.evaluation.vector_index import IndexSettings, VectorIndex
from models.vitr.head import VitrHead
from models.vitr.head_config import VitrHeadConfig

CAPTIONS, PICTURES, QUERIES = 9582, 2600, 5
REGIONS, REGION_WIDTH, WORD_WIDTH = 49, 2048, 512
CANDIDATES = 200
GOAL = 0.7  # of length / N


class Made:
    """Features at random, float16 in memory, as the store has them: lengths as of short sentences, 77 at most."""

    def __init__(self, pictures: int, captions: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.clip(rng.gamma(6.0, 1.8, captions).astype(np.int64) + 2, 4, 77)
        self.picture_of = np.sort(rng.integers(0, pictures, captions))
        drawn = torch.Generator().manual_seed(0)
        self._regions = torch.empty(pictures, REGIONS, REGION_WIDTH, dtype=torch.float16).normal_(generator=drawn)
        words = torch.empty(int(self.lengths.sum()), WORD_WIDTH, dtype=torch.float16).normal_(generator=drawn)
        self._words = words.split(self.lengths.tolist())

    def __len__(self) -> int:
        return len(self._regions)

    def regions(self, pictures: list[int]) -> list[Tensor]:
        return [self._regions[list(pictures)].float()]

    def words(self, captions: list[int]) -> tuple[list[Tensor], Tensor]:
        lengths = torch.from_numpy(self.lengths[np.asarray(captions)])
        mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        found = [self._words[caption] for caption in captions]
        return [torch.nn.utils.rnn.pad_sequence(found, batch_first=True).float()], mask


def main() -> None:
    captions, pictures, queries = (int(value) for value in (*sys.argv[1:], CAPTIONS, PICTURES, QUERIES)[:3])
    torch.manual_seed(0)
    source, head = Made(pictures, captions), VitrHead(VitrHeadConfig(), [REGION_WIDTH], [WORD_WIDTH]).eval()
    images, texts = embed_all(head, source)
    search = TowerSearch(head, source, images, texts)
    print(
        f"{captions:,} captions of {source.lengths.mean():.1f} words, {pictures:,} pictures of {REGIONS} regions, "
        f"{torch.get_num_threads()} threads, medians of {queries} queries each way"
    )
    found = query_times(search, queries=queries, candidates=[CANDIDATES])
    for name, length in (("image to text", captions), ("text to image", pictures)):
        whole, turbo = found[None][name], found[CANDIDATES][name]
        bound = length / CANDIDATES
        print(
            f"{name}: {whole:,.0f} ms without, {turbo:,.0f} ms with {CANDIDATES} candidates of {length:,}: "
            f"{whole / turbo:.1f} times (goal {GOAL} x length/N = {GOAL * bound:.1f}; length/N = {bound:.1f})"
        )
    drawn = torch.nn.functional.normalize(torch.randn(captions, WORD_WIDTH), dim=1)  # the hardest case for a graph
    started = time.perf_counter()
    graph = VectorIndex(drawn, IndexSettings("approximate"))
    built = time.perf_counter() - started
    asked = torch.randn(100, WORD_WIDTH)
    exact = VectorIndex(drawn)
    nearest = exact.search(asked, CANDIDATES)
    for kind, one in (("exact", exact), ("approximate", graph)):
        started = time.perf_counter()
        places = [one.search(query[None], CANDIDATES)[0] for query in asked]
        spent = (time.perf_counter() - started) / len(asked) * 1000
        hit = np.mean([len(np.intersect1d(a, b)) / CANDIDATES for a, b in zip(places, nearest, strict=True)])
        print(f"{kind} index: {spent:.2f} ms a query, {100 * hit:.1f}% of the nearest {CANDIDATES} vectors found")
    print(f"the approximate index of {captions:,} vectors was built in {built:.1f} s")


if __name__ == "__main__":
    main()
