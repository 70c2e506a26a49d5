"""Recalls against the published code's, from its own score matrices."""

import numpy as np
import pytest
import torch

from components.evaluation.retrieval import CUTOFFS, recall_metrics, retrieval_ranks
from components.evaluation.scoring import Candidates, Texts, rerank_itm, score_itc
from models.albef.checkpoints import import_official, official_config
from models.albef.model import Albef


@pytest.fixture(scope="module")
def expected(reference):
    return torch.load(reference / "albef" / "expected.pt", weights_only=True)


@pytest.fixture(scope="module")
def published(expected):
    return expected["retrieval"]["eval"]


@pytest.fixture(scope="module")
def model(reference, expected):
    state = torch.load(reference / "albef" / "retrieval_checkpoint.pth", weights_only=True)["model"]
    sizes = expected["config"]
    config = official_config(
        state, vision_heads=sizes["heads"], text_heads=sizes["bert"]["num_attention_heads"], text_dropout=0.0
    )
    albef = Albef(config)
    import_official(albef, state)
    return albef.eval()


def hits(scores, groups, answers, k):
    """Whether a right answer is among the first k for certain, and whether it can be, however ties are ordered."""
    certain, possible = [], []
    for row, group in zip(scores, groups, strict=True):
        right = np.asarray(answers) == group
        best = row[right].max()
        certain.append(1 + (row[~right] >= best).sum() <= k)
        # an order that puts this query's right answers first among equals
        possible.append(1 + (row[~right] > best).sum() <= k)
    return np.array(certain), np.array(possible)


def test_recalls_reproduce_where_ties_leave_one_answer(published):
    """The published code gives all candidates outside the top k_test one score, -100, and lets argsort order them.

    Where every order of such ties gives the same recall, ours must equal it; elsewhere theirs lies between ours (ties
    against the model) and the best case. (argsort's own order of equal numbers changes with NumPy and the processor.)
    """
    i2t, t2i = published["score_i2t"].numpy(), published["score_t2i"].numpy()
    picture_of = np.asarray(published["txt2img"])
    ours = recall_metrics(retrieval_ranks(i2t, t2i, picture_of))
    pictures = np.arange(len(i2t))
    settled = 0
    for direction, scores, groups, answers in (("txt", i2t, pictures, picture_of), ("img", t2i, picture_of, pictures)):
        for k in CUTOFFS:
            key = f"{direction}_r{k}"
            certain, possible = hits(scores, groups, answers, k)
            theirs = published["metrics"][key]
            assert ours[key] == pytest.approx(100 * certain.mean(), abs=1e-9)
            if (certain == possible).all():
                settled += 1
                assert ours[key] == pytest.approx(theirs, abs=1e-5), key
            else:
                assert ours[key] - 1e-5 <= theirs <= 100 * possible.mean() + 1e-5, key
    assert settled >= 2  # R@1 both ways at least: k_test is above 1


@pytest.mark.parametrize(("batch_size", "pair_batch_size"), [(64, 256), (2, 3)])
def test_score_matrices_after_reranking(model, published, batch_size, pair_batch_size):
    """The published code scores one query after another, ours pairs in batches; -100 stands for minus infinity."""
    pictures, texts = published["images"], Texts(published["input_ids"], published["attention_mask"])
    itc = score_itc(model, pictures, texts, batch_size=batch_size)
    itm = rerank_itm(
        model,
        pictures,
        texts,
        itc,
        top_k=published["k_test"],
        batch_size=batch_size,
        pair_batch_size=pair_batch_size,
    )
    assert Candidates.of(itc.similarity, published["k_test"]).count() < itc.similarity.numel()
    for ours, theirs in (
        (itm.image_to_text, published["score_i2t"]),
        (itm.text_to_image, published["score_t2i"]),
    ):
        assert torch.equal(torch.isinf(ours), theirs == -100)
        torch.testing.assert_close(ours.clamp(min=-100), theirs, atol=1e-5, rtol=1e-5)
