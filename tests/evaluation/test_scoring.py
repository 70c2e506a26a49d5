import pytest
import torch
from torch import nn
from torch.nn import functional as F

from components.evaluation.retrieval import best_ranks, recall_at
from components.evaluation.scoring import Candidates, Texts, rerank_itm, score_itc, with_tail

PICTURES, CAPTIONS, LENGTH, WIDTH = 9, 23, 12, 16


class TinyModel(nn.Module):
    """A model with the right signatures whose outputs depend on tokens and masks, but not on padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.patch, self.word = nn.Linear(12, WIDTH), nn.Embedding(50, WIDTH)
        self.head = nn.Linear(3 * WIDTH, 2)
        self.largest = 0

    def encode_image(self, images):
        self.largest = max(self.largest, len(images))
        tokens = self.patch(images.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))
        return tokens, F.normalize(tokens.mean(1), dim=-1)

    def encode_text(self, input_ids, attention_mask):
        tokens = self.word(input_ids)
        mean = (tokens * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return tokens, F.normalize(mean, dim=-1)

    def match(self, image_tokens, text_tokens, attention_mask, image_rows=None):
        if image_rows is not None:
            image_tokens = image_tokens[image_rows]
        self.largest = max(self.largest, len(image_tokens))
        attention = torch.einsum("bld,bpd->blp", text_tokens, image_tokens).softmax(-1)
        fused = torch.tanh(text_tokens + attention @ image_tokens) * attention_mask[..., None]
        both = torch.cat([fused.sum(1), text_tokens[:, 0], image_tokens.mean(1)], dim=-1)
        return self.head(both)


@pytest.fixture
def model():
    return TinyModel().eval()


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, LENGTH + 1, (CAPTIONS, 1), generator=generator)
    mask = (torch.arange(LENGTH)[None] < lengths).long()
    ids = torch.randint(1, 50, (CAPTIONS, LENGTH), generator=generator) * mask
    return torch.randn(PICTURES, 3, 8, 8, generator=generator), Texts(ids, mask)


@torch.inference_mode()
def slow_loop(model, pictures, texts, top_k):
    """One query at a time, both directions, as the published code goes about it."""
    image_tokens, image_features = model.encode_image(pictures)
    text_tokens, text_features = model.encode_text(texts.input_ids, texts.attention_mask)
    similarity = image_features @ text_features.T
    i2t = torch.full((len(pictures), len(texts)), -100.0)
    t2i = torch.full((len(texts), len(pictures)), -100.0)
    for picture in range(len(pictures)):
        for text in similarity[picture].topk(min(top_k, len(texts))).indices.tolist():
            one = slice(text, text + 1)
            logits = model.match(image_tokens[picture : picture + 1], text_tokens[one], texts.attention_mask[one])
            i2t[picture, text] = logits[0, 1]
    for text in range(len(texts)):
        for picture in similarity[:, text].topk(min(top_k, len(pictures))).indices.tolist():
            one = slice(text, text + 1)
            logits = model.match(image_tokens[picture : picture + 1], text_tokens[one], texts.attention_mask[one])
            t2i[text, picture] = logits[0, 1]
    return similarity, i2t, t2i


@pytest.mark.parametrize("top_k", [1, 4, 9, 100])
@pytest.mark.parametrize(("batch_size", "pair_batch_size"), [(2, 5), (64, 256)])
def test_batched_scores_equal_a_loop_over_queries(model, inputs, top_k, batch_size, pair_batch_size):
    pictures, texts = inputs
    similarity, i2t, t2i = slow_loop(model, pictures, texts, top_k)
    itc = score_itc(model, pictures, texts, batch_size=batch_size)
    torch.testing.assert_close(itc.similarity, similarity, atol=1e-6, rtol=1e-5)
    itm = rerank_itm(model, pictures, texts, itc, top_k=top_k, batch_size=batch_size, pair_batch_size=pair_batch_size)
    for ours, theirs in ((itm.image_to_text, i2t), (itm.text_to_image, t2i)):
        torch.testing.assert_close(ours.clamp(min=-100), theirs, atol=1e-5, rtol=1e-5)


def test_batches_are_bounded_and_pairs_run_once(model, inputs):
    pictures, texts = inputs
    done = []
    itc = score_itc(model, pictures, texts, batch_size=4, advance=done.append)
    assert sum(done) == PICTURES + CAPTIONS
    model.largest, done = 0, []
    itm = rerank_itm(model, pictures, texts, itc, top_k=4, batch_size=4, pair_batch_size=7, advance=done.append)
    assert model.largest <= 7
    asked = torch.isfinite(itm.image_to_text) | torch.isfinite(itm.text_to_image.T)
    assert sum(done) == int(asked.sum()) == Candidates.of(itc.similarity, 4).count()
    assert sum(done) < PICTURES * 4 + CAPTIONS * 4


def test_tail_follows_the_top_in_order_of_similarity():
    similarity = torch.tensor([[0.9, 0.8, 0.1, 0.3]])
    reranked = torch.tensor([[-250.0, 3.0, -torch.inf, -torch.inf]])
    scores = with_tail(reranked, similarity)
    assert scores.argsort(descending=True).tolist() == [[1, 0, 3, 2]]
    assert scores[0, :2].tolist() == [-250.0, 3.0]


def test_recall_up_to_top_k_is_the_published_one(model, inputs):
    pictures, texts = inputs
    similarity, i2t, _ = slow_loop(model, pictures, texts, 5)
    owner = torch.arange(CAPTIONS) % PICTURES
    itm = rerank_itm(model, pictures, texts, score_itc(model, pictures, texts), top_k=5)
    published = best_ranks(i2t, range(PICTURES), owner)
    ours = best_ranks(with_tail(itm.image_to_text, similarity), range(PICTURES), owner)
    assert [recall_at(ours, k) for k in range(1, 6)] == [recall_at(published, k) for k in range(1, 6)]


def test_nothing_to_score(model, inputs):
    pictures, texts = inputs
    with pytest.raises(ValueError, match="0 pictures"):
        score_itc(model, pictures[:0], texts)
