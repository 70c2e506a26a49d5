import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from components.data.tokenizer import load_tokenizer
from components.io.errors import UserError
from components.io.shards import ShardReader
from components.training.augment import (
    COLOUR,
    GEOMETRY,
    augment,
    evaluation_transform,
    evaluation_view,
    normalise,
    randaugment,
    random_box,
    to_batch,
)
from components.training.data import Draw, PairData, Plan, batches
from components.training.settings import AugmentParams, TrainingParams

PLAIN = AugmentParams(crop_scale=(1, 1), flip=False, randaugment_operations=0)


def picture(width=40, height=30, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data(shards, **changes):
    arguments = {"image_size": 32, "max_tokens": 12, "augment": AugmentParams(), "seed": 3} | changes
    return PairData(ShardReader(shards), load_tokenizer(shards), **arguments)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@given(
    samples=st.integers(1, 60),
    share=st.integers(1, 5),
    world=st.integers(1, 4),
    seed=st.integers(0, 9),
    cut=st.floats(0, 1),
)
def test_shares_of_the_workers_join_to_the_one_worker_batch_at_every_step(samples, share, world, seed, cut):
    size = share * world
    whole = Plan(samples, size, seed)
    steps = 3 * whole.per_epoch
    if steps == 0:
        return
    alone = list(whole.draws(0, steps))
    ranks = [list(Plan(samples, size, seed, rank, world).draws(0, steps)) for rank in range(world)]
    for step, draw in enumerate(alone):
        assert draw.epoch == step // whole.per_epoch
        joined = [sample for rank in ranks for sample in rank[step].samples]
        assert joined == list(draw.samples)
        assert all(len(rank[step].samples) == share for rank in ranks)
    for epoch in range(3):
        seen = [sample for draw in alone if draw.epoch == epoch for sample in draw.samples]
        assert len(set(seen)) == len(seen) == whole.per_epoch * size
    start = int(cut * steps)
    assert list(whole.draws(start, steps)) == alone[start:]


def test_epochs_and_seeds_differ_in_order():
    first, second = list(Plan(50, 50, 0).draws(0, 2))
    assert first.samples != second.samples
    assert first.samples != next(Plan(50, 50, 1).draws(0, 1)).samples


def test_a_batch_does_not_depend_on_what_was_loaded_before(shards):
    draw = Draw(1, (4, 0, 7))
    fresh, used = data(shards), data(shards, cache_bytes=1 << 20)
    used[Draw(0, (7, 4))]
    assert used._cache, "the small set must be cached"
    assert equal(fresh[draw], used[draw])
    assert equal(fresh[draw], pickle.loads(pickle.dumps(used))[draw])
    assert not equal(fresh[draw], fresh[Draw(2, (4, 0, 7))])
    assert not equal(fresh[draw], data(shards, seed=4)[draw])


def test_pretraining_draws_every_caption_of_a_picture_over_the_epochs(shards):
    samples = data(shards, augment=PLAIN)
    ids = {tuple(samples[Draw(epoch, (2,))].input_ids[0].tolist()) for epoch in range(40)}
    captions = ShardReader(shards)[2]["captions"]
    expected = {tuple(load_tokenizer(shards).encode_batch([caption], 12)[0][0].tolist()) for caption in captions}
    assert len(captions) == 3
    assert ids == expected


def test_finetuning_samples_are_the_captions(shards):
    samples, reader = data(shards, every_caption=True), ShardReader(shards)
    pairs = [(index, text) for index in range(len(reader)) for text in reader[index]["captions"]]
    assert len(samples) == len(pairs)
    batch = samples[Draw(0, tuple(range(len(pairs))))]
    assert batch.image_ids.tolist() == [index for index, _ in pairs]
    expected, mask = load_tokenizer(shards).encode_batch([text for _, text in pairs], 12)
    assert torch.equal(batch.input_ids, expected)
    assert torch.equal(batch.attention_mask, mask)


def test_texts_are_padded_to_the_longest_of_the_batch(shards):
    batch = data(shards)[Draw(0, (0, 1, 2, 3))]
    assert batch.images.shape == (4, 3, 32, 32)
    assert batch.images.dtype == torch.uint8
    assert batch.input_ids.shape == batch.attention_mask.shape
    assert batch.attention_mask.sum(dim=1).max() == batch.input_ids.shape[1] <= 12


def test_a_damaged_picture_is_named(shards, monkeypatch):
    samples = data(shards)
    record = samples.reader[5]
    monkeypatch.setattr(ShardReader, "__getitem__", lambda self, index: record | {"image": record["image"][:60]})
    plan = Plan(len(samples), 2, 0)
    with pytest.raises(UserError, match=r"picture .* cannot be decoded .* damaged"):
        next(batches(samples, plan, 0, 1, TrainingParams()))


@pytest.mark.slow
def test_loading_processes_change_nothing(shards):
    samples, plan = data(shards), Plan(13, 4, 1)
    here = list(batches(samples, plan, 1, 6, TrainingParams()))
    there = list(batches(samples, plan, 1, 6, TrainingParams(loader_workers=2)))
    assert len(here) == len(there) == 5
    assert all(equal(a, b) for a, b in zip(here, there, strict=True))


@given(width=st.integers(1, 300), height=st.integers(1, 300), seed=st.integers(0, 99), low=st.floats(0.01, 1))
@settings(max_examples=200)
def test_a_crop_lies_within_the_picture(width, height, seed, low):
    params = AugmentParams(crop_scale=(low, 1.0))
    left, top, right, bottom = random_box(width, height, params, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


def test_crops_keep_the_asked_share_of_the_area():
    rng = np.random.default_rng(0)
    boxes = [random_box(400, 400, AugmentParams(crop_scale=(0.5, 0.6)), rng) for _ in range(200)]
    shares = [(right - left) * (bottom - top) / 160_000 for left, top, right, bottom in boxes]
    assert 0.49 < min(shares) < 0.52
    assert 0.58 < max(shares) < 0.61


def test_without_augmentation_training_sees_what_evaluation_sees():
    view = augment(picture(), ["a square"], 24, PLAIN, np.random.default_rng(0))
    assert np.array_equal(view, evaluation_view(picture(), 24))
    image = evaluation_transform(24)(picture())
    assert image.shape == (3, 24, 24)
    assert image.dtype == torch.float32
    assert torch.equal(image, normalise(to_batch([view]))[0])


def test_normalisation_is_that_of_clip():
    pixels = torch.tensor([0.48145466, 0.4578275, 0.40821073]).mul(255).round().to(torch.uint8).view(1, 3, 1, 1)
    assert normalise(pixels).abs().max() < 0.01
    white = normalise(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    assert torch.allclose(white, torch.tensor([1.9303, 2.0749, 2.1459]), atol=1e-3)


@pytest.mark.parametrize(
    ("caption", "with_sides", "mirrored"),
    [
        ("a cube left of a ball", False, False),
        ("the RIGHT one", False, False),
        ("the rightmost one", False, False),
        ("a cube left of a ball", True, True),
        ("a bright leftover", False, False),
        ("a bright cube", False, True),
    ],
)
def test_pictures_whose_captions_name_sides_are_not_mirrored(caption, with_sides, mirrored):
    params = PLAIN.model_copy(update={"flip": True, "flip_with_sides": with_sides})
    plain = evaluation_view(picture(), 24)
    views = [augment(picture(), [caption], 24, params, np.random.default_rng(seed)) for seed in range(30)]
    flips = sum(np.array_equal(view, plain[:, ::-1]) for view in views)
    assert flips + sum(np.array_equal(view, plain) for view in views) == 30
    assert 5 < flips < 25 if mirrored else flips == 0


def test_every_operation_keeps_size_and_all_but_the_identity_change_pixels():
    image = Image.fromarray(np.asarray(picture(32, 32)) // 2 + 20)
    for operation in GEOMETRY + COLOUR:
        changed = operation(image, 0.7, -1.0)
        assert (changed.size, changed.mode) == (image.size, "RGB")
        assert (np.asarray(changed) != np.asarray(image)).any() == (operation is not GEOMETRY[0]), operation


def test_colours_stay_unless_asked_for():
    """A picture of one colour, seen through geometry alone, has that colour and the fill only."""
    image = Image.new("RGB", (32, 32), (128, 128, 128))
    params = AugmentParams(randaugment_operations=4, randaugment_magnitude=9)
    rng = np.random.default_rng(0)
    assert all((np.asarray(randaugment(image, params, rng)) == 128).all() for _ in range(50))
    colourful = params.model_copy(update={"randaugment_colour": True})
    assert any((np.asarray(randaugment(image, colourful, rng)) != 128).any() for _ in range(50))
