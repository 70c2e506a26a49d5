"""A tiny CLIP among the towers: its tokenizer, its features, its fine-tuning, and VITR on what came of it."""

import json

import numpy as np
import pytest
import tokenizers
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from components.data.tokenizer import load_tokenizer
from components.evaluation.evaluate import EvaluateParams, evaluate
from components.evaluation.tower_explain import explain_towers
from components.evaluation.tower_models import EncodedSplit, load_tower_model
from components.evaluation.tower_scoring import embed_all, score_all, score_candidates
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training import feature_work
from components.training.feature_store import FeatureReader
from components.training.features import FeaturesParams, TowersParams, features
from components.training.finetune import FinetuneParams, finetune
from components.training.tower_files import read_tensors

START, END = "<|startoftext|>", "<|endoftext|>"
SIZES = {"patch_size": 16, "image_layers": 1, "image_width": 16, "image_heads": 2, "text_layers": 2, "text_width": 16}
SIZES |= {"text_heads": 2, "joint_width": 12, "vocab_size": 400, "max_positions": 20}
HEAD = {"regions": 4, "local_width": 8, "join_width": 8, "reasoning_steps": 1, "fusion_steps": 1, "projection": False}


def clip_tokenizer(captions, path):
    """A tokenizer.json as CLIP's is made: BPE over bytes, words that end in </w>, its two special tokens."""
    inner = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=END))
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    pattern = r"<\|startoftext\|>|<\|endoftext\|>|'s|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[START, END],
        end_of_word_suffix="</w>",
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    letters = " ".join("abcdefghijklmnopqrstuvwxyz<>|'")  # each as a word of its own: CLIP knows every byte as an end
    inner.train_from_iterator([*captions, letters], trainer)
    ids = {token: inner.token_to_id(token) for token in (START, END)}
    inner.post_processor = processors.RobertaProcessing((END, ids[END]), (START, ids[START]))
    inner.save(str(path))
    return path


@pytest.fixture(scope="module")
def vocabulary(task, tmp_path_factory):
    captions = [text for texts in feature_work.ShardReader(task / "train").captions for text in texts]
    return clip_tokenizer(captions, tmp_path_factory.mktemp("clip") / "tokenizer.json")


def tower_params(task, vocabulary, *, alone=False, **changes):
    chosen = {"task": str(task), "vocabulary": str(vocabulary), "max_tokens": 16, "semantic_values": 3}
    chosen |= {"image": {"model": "resnet18", "image_size": 64, "stages": [5]}, "batch_size": 4, "pictures_per_part": 4}
    return {**chosen, "clip": {**SIZES, "alone": alone}, **changes}


def extract(params, task, folder):
    wanted = FeaturesParams.model_validate_json(json.dumps({"towers": {"tiny": params}}))
    runtime = Runtime(work=folder / "work", processes=1)
    features(wanted, towers="tiny", task=task, features=folder / "features", runtime=runtime)
    return folder / "features"


@pytest.fixture(scope="module")
def cached(task, vocabulary, tmp_path_factory):
    return extract(tower_params(task, vocabulary), task, tmp_path_factory.mktemp("both"))


@pytest.fixture(scope="module")
def alone(task, vocabulary, tmp_path_factory):
    return extract(tower_params(task, vocabulary, alone=True), task, tmp_path_factory.mktemp("alone"))


def train(task, cached, folder, **changes):
    run = {"epochs": 2, "batch_size": 6, "log_every": 1, "num_threads": 1, "task": str(task)} | changes
    run["pretrained"] = str(cached)
    params = FinetuneParams.model_validate_json(json.dumps({"runs": {"tiny": run}}))
    options = {"weights": folder / "weights", "curves": folder / "curves", "runtime": Runtime(work=folder / "work")}
    finetune(params, run="tiny", task=task, pretrained=cached, **options)
    return folder / "weights"


def fine_tune(task, alone, folder, **changes):
    """The paper's baseline: both encoders learn with the contrastive loss."""
    schedule = {"kind": "cosine_by_iteration", "lr": 1e-3, "warmup_lr": 1e-4, "warmup_iterations": 1}
    options = {"kind": "linear", "freeze_epochs": 0, "schedule": schedule, "keep_weights": "last"}
    return train(task, alone, folder, head={"projection": False, "temperature": 0.01}, **options | changes)


# -- the tokenizer


def test_clip_s_tokenizer_marks_both_ends_and_keeps_them_when_it_cuts(vocabulary):
    tokenizer = load_tokenizer(vocabulary, clip=True)
    ids, mask = tokenizer.encode_batch(["a Large red cube", "a", "a large " * 30], 8)
    assert ids.shape == (3, 8)
    last = mask.sum(dim=1) - 1
    assert ids[:, 0].tolist() == [tokenizer.cls_id] * 3
    assert ids[torch.arange(3), last].tolist() == [tokenizer.sep_id] * 3
    assert torch.equal(tokenizer.encode_batch(["A LARGE red cube"], 8)[0], ids[:1, : int(mask[0].sum())])


def test_what_a_caption_says_of_special_tokens_is_text(vocabulary):
    tokenizer = load_tokenizer(vocabulary, clip=True)
    ids, mask = tokenizer.encode_batch([f"a {END} cube {START}"], 60)
    assert (ids == tokenizer.sep_id).sum() == (ids == tokenizer.cls_id).sum() == 1
    assert bool(mask.all())


def test_words_are_put_together_from_pieces(vocabulary):
    tokenizer = load_tokenizer(vocabulary, clip=True)
    ids = tokenizer.encode_batch(["a qzxqzx large cube's"], 40)[0][0].tolist()
    words = tokenizer.words(ids)
    assert [word for word, _ in words] == ["a", "qzxqzx", "large", "cube", "'s"]
    assert sorted(place for _, places in words for place in places) == list(range(1, len(ids) - 1))


def test_other_tokenizers_are_refused(shards, vocabulary, tmp_path):
    with pytest.raises(UserError, match="the models here read BERT WordPiece: give"):
        load_tokenizer(vocabulary)
    assert not load_tokenizer(shards / "tokenizer.json", clip=True).is_clip
    plain = tokenizers.Tokenizer.from_file(str(vocabulary))
    plain.post_processor = processors.ByteLevel()
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="is not CLIP's"):
        load_tokenizer(tmp_path / "tokenizer.json", clip=True)
    with pytest.raises(UserError, match="is BPE, the models here read BERT WordPiece"):
        load_tokenizer(tmp_path / "tokenizer.json")


# -- features


def test_the_first_level_is_clip_s_own_vectors(task, cached):
    reader = FeatureReader(cached / "train")
    image, text = feature_work.load_towers(cached)
    tokenizer = load_tokenizer(cached, clip=True)
    records = feature_work.ShardReader(task / "train")
    words, mask = reader.words([0, 4, 17])
    ids, own = tokenizer.encode_batch([reader.captions[index] for index in (0, 4, 17)], 16)
    assert torch.equal(mask.long(), own)
    assert [tuple(level.shape) for level in words] == [(3, 1, 12), (3, mask.shape[1], 12)]
    want = text(ids, own)
    torch.testing.assert_close(words[0], want[0].detach(), atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(words[1], (want[1] * own[:, :, None]).detach(), atol=5e-3, rtol=5e-3)
    regions = reader.regions([8])
    assert [tuple(level.shape) for level in regions] == [(1, 1, 12), (1, 4, 512)]
    pixels = feature_work.view(records, 8, 64)[None].float() / 255
    for level, one in zip(regions, image(pixels), strict=True):
        torch.testing.assert_close(level, one.detach(), atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(reader.pooled_words()[0][[0, 4, 17]], words[0][:, 0])
    torch.testing.assert_close(reader.pooled_regions()[0][8], regions[0][0, 0])


def test_a_clip_from_its_file_is_that_clip(task, cached, vocabulary, tmp_path):
    from safetensors.torch import save_file

    whole = load_file(cached / "towers.safetensors")
    names = {"image.net.": "", "text.net.": ""}
    state = {
        name.removeprefix(prefix): value
        for name, value in whole.items()
        for prefix in names
        if name.startswith((f"{prefix}vision", f"{prefix}visual", f"{prefix}text"))
    }
    save_file(state | {"logit_scale": torch.ones(())}, tmp_path / "clip.safetensors")
    params = tower_params(task, vocabulary, clip_weights=str(tmp_path / "clip.safetensors"), seed=9)
    other = load_file(extract(params, task, tmp_path) / "towers.safetensors")
    same = {name for name, value in whole.items() if torch.equal(other[name], value)}
    assert {name for name in whole if name.startswith(("image.net.", "text.net."))} <= same
    assert "image.local.net.conv1.weight" not in same
    halved = {name: value for name, value in state.items() if not name.startswith("text")}
    save_file(halved, tmp_path / "half.safetensors")
    with pytest.raises(UserError, match="does not fit its tower: the weights hold no text encoder of a CLIP"):
        extract(params | {"clip_weights": str(tmp_path / "half.safetensors")}, task, tmp_path / "half")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": {"width": 24}}, "text plays no part beside `clip`"),
        ({"text_weights": "x"}, "text_weights plays no part beside `clip`"),
        ({"image": {"stages": [4, 5]}}, "beside `clip`, which has one of words, name one"),
        ({"max_tokens": 21}, "max_tokens 21 is above clip.max_positions 20"),
        ({"clip": None, "clip_weights": "x"}, "clip_weights without `clip`"),
        ({"clip": SIZES | {"alone": True}, "image_weights": "x"}, "image_weights plays no part where `clip` is alone"),
    ],
)
def test_what_does_not_go_together_is_said(changes, said, task, vocabulary):
    with pytest.raises(ValidationError, match=said):
        TowersParams.model_validate_json(json.dumps(tower_params(task, vocabulary) | changes))


def test_what_does_not_fit_the_vocabulary_is_said(task, shards, vocabulary, tmp_path):
    with pytest.raises(UserError, match=r"set clip.vocab_size"):
        extract(tower_params(task, vocabulary, clip=SIZES | {"vocab_size": 50}), task, tmp_path)
    with pytest.raises(UserError, match="is no tokenizer of a CLIP"):
        extract(tower_params(task, shards / "tokenizer.json"), task, tmp_path)
    with pytest.raises(UserError, match="open_clip:ViT-X/none is not known here; known: ViT-B-32/openai"):
        read_tensors("open_clip:ViT-X/none")


# -- runs


def test_a_clip_is_fine_tuned_and_vitr_stands_on_it(task, alone, vocabulary, tmp_path):
    before = load_file(alone / "towers.safetensors")
    tuned = fine_tune(task, alone, tmp_path / "clip")
    after = load_file(tuned / "model.safetensors")
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert any(name.startswith("image.net.vision_model.encoder") for name in changed)
    assert any(name.startswith("text.net.text_model.encoder") for name in changed)
    assert set(after) - set(before) == {"head.log_scale"}
    losses = json.loads((tuned / "metrics.json").read_text())
    assert losses["last"]["loss"] < losses["first"]["loss"]

    params = tower_params(task, vocabulary, clip_weights=str(tuned / "model.safetensors"))
    cached = extract(params, task, tmp_path)
    towers = load_file(cached / "towers.safetensors")
    for name, value in after.items():
        if not name.startswith("head."):
            assert torch.equal(towers[name], value)
    weights = train(task, cached, tmp_path / "vitr", kind="vitr", head=HEAD, contrast_weight=0)
    model, sizes = load_tower_model(weights, "cpu")
    clip, _ = load_tower_model(tuned, "cpu")
    reader = FeatureReader(cached / "val")
    scores = score_all(model.head, reader)
    split = EncodedSplit.read(task / "val", model, sizes, weights, "cpu")
    for name, matrix in score_all(model.head, split).items():
        torch.testing.assert_close(scores[name], matrix, atol=2e-2, rtol=2e-2)
    own = EncodedSplit.read(task / "val", clip, {"image": sizes["image"], "max_tokens": 16}, tuned, "cpu")
    torch.testing.assert_close(scores["similarity"], score_all(clip.head, own)["similarity"], atol=5e-3, rtol=5e-3)
    images, texts = embed_all(model.head, reader)
    torch.testing.assert_close(images @ texts.T, scores["similarity"], atol=1e-5, rtol=1e-5)
    few = score_candidates(model.head, reader, 1000)
    torch.testing.assert_close(few.image_to_text["vitr"], scores["vitr"], atol=1e-5, rtol=1e-5)


def test_a_clip_alone_is_read_and_evaluated_as_it_is(task, alone, tmp_path):
    weights = fine_tune(task, alone, tmp_path, freeze_epochs=9)
    before, after = load_file(alone / "towers.safetensors"), load_file(weights / "model.safetensors")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    options = {"run": "tiny", "task": task, "weights": weights, "evaluation": tmp_path / "evaluation"}
    evaluate(EvaluateParams(split="val", examples=1), **options, runtime=Runtime(work=tmp_path / "work"))
    metrics = json.loads((tmp_path / "evaluation" / "metrics.json").read_text())
    assert metrics["labels"] == {"itc": "CLIP", "itm": "CLIP"}
    assert np.isfinite(metrics["scores"]["similarity"]["r_sum"])


@pytest.mark.parametrize("kind", ["vse", "vsrn", "hat"])
def test_other_heads_read_clip_s_words_and_the_regions(kind, task, cached, tmp_path):
    head = {"vse": {"width": 8, "position_width": 4}, "vsrn": {"width": 8}, "hat": {"width": 8, "levels": [2]}}[kind]
    weights = train(task, cached, tmp_path, kind=kind, head=head, epochs=1)
    assert np.isfinite(json.loads((weights / "metrics.json").read_text())["last"]["loss"])


def test_words_of_clip_are_explained(task, cached, tmp_path):
    from PIL import Image

    weights = train(task, cached, tmp_path, kind="vitr", head=HEAD, epochs=1)
    model, sizes = load_tower_model(weights, "cpu")
    picture = Image.new("RGB", (64, 64), (200, 30, 30))
    shown = explain_towers(model, sizes, load_tokenizer(weights, clip=True), picture, "a large red cube")
    assert [word.text for word in shown.words] == ["the whole caption", "a", "large", "red", "cube"]


@pytest.mark.parametrize(
    ("towers", "changes", "said"),
    [
        ("alone", {"kind": "vitr", "head": HEAD}, "reads regions and words, which .* lacks: set clip.alone"),
        ("cached", {"kind": "hat", "head": {"width": 8, "levels": [1, 2]}}, r"head.levels must be \[2\]"),
    ],
)
def test_runs_that_cannot_read_such_towers_are_said(towers, changes, said, task, tmp_path, request):
    with pytest.raises(UserError, match=said):
        train(task, request.getfixturevalue(towers), tmp_path, **changes)
