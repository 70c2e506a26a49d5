"""The index of global vectors: exact, approximate, reproducible, and what it makes of bad vectors."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from components.evaluation.vector_index import IndexSettings, VectorIndex

KINDS = [IndexSettings("exact"), IndexSettings("approximate")]
each_kind = pytest.mark.parametrize("settings", KINDS, ids=["exact", "approximate"])


def vectors(count, width=16, seed=0):
    """Vectors of length 1 around a few centres, as those of real captions are."""
    drawn = torch.Generator().manual_seed(seed)
    centres = torch.randn(20, width, generator=drawn)
    chosen = torch.randint(20, (count,), generator=drawn)
    return normalize(centres[chosen] + 0.5 * torch.randn(count, width, generator=drawn), dim=1)


def test_exact_is_the_whole_order_cut_off_and_equal_ones_stand_by_position():
    rows, queries = vectors(300), vectors(40, seed=1)
    rows[7] = rows[200] = rows[250] = rows[3]
    want = np.argsort(-(queries.double() @ rows.double().T).numpy(), axis=1, kind="stable")
    found = VectorIndex(rows).search(queries, 25)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, want[:, :25])
    for count in (1, 2, 3):  # the cut goes through the equal ones
        assert VectorIndex(rows).search(rows[3:4], count)[0].tolist() == [3, 7, 200][:count]


@each_kind
def test_more_than_there_are_is_all_of_them(settings):
    rows, queries = vectors(30), vectors(5, seed=1)
    found = VectorIndex(rows, settings).search(queries, 1000)
    np.testing.assert_array_equal(found, np.argsort(-(queries @ rows.T).numpy(), axis=1, kind="stable"))
    assert VectorIndex(rows, settings).search(queries[:0], 7).shape == (0, 7)


def test_the_graph_finds_most_more_of_them_as_it_looks_deeper_and_the_same_every_time():
    rows, queries = vectors(3000), vectors(50, seed=1)
    exact = VectorIndex(rows).search(queries, 50)
    shares = []
    for depth in (1, 8):
        found = VectorIndex(rows, IndexSettings("approximate", depth, seed=5)).search(queries, 50)
        again = VectorIndex(rows.clone(), IndexSettings("approximate", depth, seed=5)).search(queries, 50)
        np.testing.assert_array_equal(found, again)
        products = np.take_along_axis((queries @ rows.T).numpy(), found, axis=1)
        assert (np.diff(products, axis=1) <= 1e-6).all()
        shares.append(np.mean([len(np.intersect1d(a, b)) / 50 for a, b in zip(found, exact, strict=True)]))
    assert 0.5 < shares[0] <= shares[1]
    assert shares[1] > 0.97


@each_kind
def test_zero_and_equal_vectors_are_found_like_any(settings):
    rows = vectors(500, width=8)
    rows[::25] = 0
    rows[301:311] = rows[300 + 5]
    index = VectorIndex(rows, settings)
    assert set(index.search(rows[305:306], 12)[0]) > set(range(301, 311))
    empty = index.search(torch.zeros(1, 8), 20)
    assert len(np.unique(empty)) == 20
    if settings.kind == "exact":
        assert empty[0].tolist() == list(range(20))
    same = VectorIndex(torch.zeros(500, 8), settings).search(torch.ones(1, 8), 20)
    assert len(np.unique(same)) == 20


@pytest.mark.parametrize(
    ("rows", "queries", "count", "said"),
    [
        (torch.zeros(0, 4), torch.zeros(1, 4), 1, "no vector to search"),
        (torch.zeros(4), torch.zeros(1, 4), 1, r"vectors are \(4,\), expected"),
        (torch.tensor([[0.0, 1], [0, float("nan")]]), torch.zeros(1, 2), 1, "row 1 of vectors holds numbers"),
        (torch.zeros(3, 4), torch.full((1, 4), float("inf")), 1, "row 0 of queries holds numbers"),
        (torch.zeros(3, 4), torch.zeros(1, 5), 1, "queries are 5 wide, the vectors 4"),
        (torch.zeros(3, 4), torch.zeros(1, 4), 0, "0 neighbours asked for"),
    ],
)
def test_what_cannot_be_searched_is_said(rows, queries, count, said):
    with pytest.raises(ValueError, match=said):
        VectorIndex(rows).search(queries, count)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells a process's libraries by /proc")
def test_the_graph_brings_no_openmp_of_its_own():
    code = "import voyager, pathlib; print(pathlib.Path('/proc/self/maps').read_text())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "voyager_ext" in done.stdout
    assert not re.search(r"lib(gomp|iomp|omp)", done.stdout)
