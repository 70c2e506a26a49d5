"""Features of tiny random towers, and HAT, VITR and the dual encoder learning from them."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from components.data.tokenizer import load_tokenizer
from components.evaluation.scoring import OUTSIDE
from components.evaluation.tower_explain import explain_towers
from components.evaluation.tower_models import EncodedSplit, TowerModel, load_tower_model, make_head
from components.evaluation.tower_scoring import recalls, score_all, score_candidates
from components.evaluation.vector_index import EXACT, IndexSettings
from components.io.errors import UserError
from components.io.runtime import Runtime
from components.training import feature_work
from components.training.data import Draw
from components.training.feature_data import FeatureData
from components.training.feature_store import FeatureReader
from components.training.features import FeaturesParams, features
from components.training.finetune import FinetuneParams, finetune
from components.training.settings import AugmentParams
from models.hat.config import HatHeadConfig
from models.hat.cross_attention import attention_weights
from models.vitr.model import heat_map
from tests.training.conftest import outs_of_evaluate

TOWERS = {
    "image": {"model": "tf_efficientnet_lite0", "image_size": 64, "stages": [4, 5, 6], "grid": 2},
    "text": {
        "layers": 3,
        "take": [1, 2, 3],
        "width": 16,
        "heads": 2,
        "intermediate": 32,
        "vocab_size": 80,
        "max_positions": 16,
        "dropout": 0,
    },
    "max_tokens": 16,
    "semantic_values": 3,
    "batch_size": 4,
    "pictures_per_part": 4,
    "seed": 3,
}
RUN = {"epochs": 2, "batch_size": 6, "log_every": 1, "num_threads": 1}
HEADS = {
    "linear": {"width": 8},
    "hat": {"width": 8},
    "vitr": {"regions": 4, "local_width": 8, "join_width": 8, "reasoning_steps": 1, "fusion_steps": 1},
    "vse": {"width": 8, "position_width": 4},
    "vsrn": {"width": 8, "reasoning_steps": 2},
}
SCORES = {"hat": "ensemble", "vitr": "vitr"}  # what a model is judged by, where that is not `similarity`


def feature_params(task, shards, **changes):
    chosen = TOWERS | {"task": str(task), "vocabulary": str(shards / "tokenizer.json")} | changes
    return FeaturesParams.model_validate({"towers": {"tiny": chosen}})


@pytest.fixture(scope="module")
def cached(task, shards, tmp_path_factory):
    """The features of the tiny task."""
    folder = tmp_path_factory.mktemp("features")
    runtime = Runtime(work=folder / "work", processes=1)
    features(feature_params(task, shards), towers="tiny", task=task, features=folder / "tiny", runtime=runtime)
    return folder / "tiny"


def train(kind, task, cached, folder, **changes):
    run = RUN | {"kind": kind, "task": str(task), "pretrained": str(cached), "head": HEADS[kind]} | changes
    if kind == "linear":
        run["schedule"] = {"kind": "cosine_by_iteration", "lr": 1e-3, "warmup_lr": 1e-4, "warmup_iterations": 1}
    params = FinetuneParams.model_validate_json(json.dumps({"runs": {"tiny": run}}))
    options = {"weights": folder / "weights", "curves": folder / "curves", "runtime": Runtime(work=folder / "work")}
    finetune(params, run="tiny", task=task, pretrained=cached, **options)
    return folder / "weights"


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_features_are_what_the_towers_say(task, cached):
    reader = FeatureReader(cached / "train")
    image, text = feature_work.load_towers(cached)
    assert len(reader) == 9
    assert reader.picture_of.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5, 5, 6, 7, 7, 8, 8, 8]
    tokenizer = feature_work.load_tokenizer(cached)
    records = feature_work.ShardReader(task / "train")
    for caption in (0, 4, 17):
        words, mask = reader.words([caption])
        ids, own = tokenizer.encode_batch([reader.captions[caption]], 16)
        assert torch.equal(mask.long(), own)
        for level, want in zip(words, text(ids, own), strict=True):
            torch.testing.assert_close(level, want.detach(), atol=5e-3, rtol=5e-3)
    for picture in (0, 8):
        regions = reader.regions([picture])
        want = image(feature_work.view(records, picture, 64)[None].float() / 255)
        for level, one in zip(regions, want, strict=True):
            torch.testing.assert_close(level, one.detach(), atol=5e-3, rtol=5e-3)
    assert np.load(cached / "train" / "semantic.npy").shape == (18, 3)


def test_pooled_features_are_the_means(cached):
    reader = FeatureReader(cached / "train")
    regions, words = reader.pooled_regions(), reader.pooled_words()
    for level in range(3):
        torch.testing.assert_close(regions[level], reader.regions(range(9))[level].mean(dim=1))
        for caption in range(18):
            want = reader.words([caption])[0][level][0].mean(dim=0)
            torch.testing.assert_close(words[level][caption], want, atol=1e-5, rtol=1e-4)


def test_words_are_padded_and_masked(cached):
    reader = FeatureReader(cached / "val")
    words, mask = reader.words(range(len(reader.picture_of)))
    assert mask.sum(dim=1).tolist() == reader.lengths.tolist()
    assert all((level[~mask] == 0).all() for level in words)


def test_a_stopped_extraction_goes_on_and_gives_the_same_bytes(task, shards, cached, tmp_path, monkeypatch):
    params, runtime = feature_params(task, shards), Runtime(work=tmp_path / "work", processes=1)
    parts = []

    def stop_at_third(reader, index, size, view=feature_work.view):
        parts.append(index)
        if len(parts) == 6:
            raise KeyboardInterrupt
        return view(reader, index, size)

    with monkeypatch.context() as patch:
        patch.setattr(feature_work, "view", stop_at_third)
        with pytest.raises(KeyboardInterrupt):
            features(params, towers="tiny", task=task, features=tmp_path / "out", runtime=runtime)
    features(params, towers="tiny", task=task, features=tmp_path / "out", runtime=runtime)
    assert files_of(tmp_path / "out") == files_of(cached)
    assert not list((tmp_path / "work").rglob("*.npy"))


@pytest.mark.parametrize("kind", HEADS)
def test_a_run_learns_and_its_model_scores_as_the_features_do(kind, task, cached, tmp_path):
    weights = train(kind, task, cached, tmp_path)
    metrics = json.loads((weights / "metrics.json").read_text())
    assert metrics["steps"] == 6
    assert np.isfinite(metrics["last"]["loss"])
    model, sizes = load_tower_model(weights, "cpu")
    assert sizes["kind"] == kind
    reader = FeatureReader(cached / "val")
    split = EncodedSplit.read(task / "val", model, sizes, weights, "cpu")
    from_features = score_all(model.head, reader, picture_block=2, caption_block=3)
    from_pictures = score_all(model.head, split)
    for name, matrix in from_features.items():
        assert matrix.shape == (5, len(reader.picture_of))
        torch.testing.assert_close(matrix, from_pictures[name], atol=2e-2, rtol=2e-2)
    found = recalls(from_features, reader.picture_of)
    best = json.loads((weights / "metrics.json").read_text())["best"]["score"]
    name = SCORES.get(kind, "similarity")
    assert found[name]["r_mean"] == pytest.approx(best)
    assert found[name]["r_sum"] == pytest.approx(
        sum(found[name][f"{d}_r{k}"] for d in ("txt", "img") for k in (1, 5, 10))
    )


def test_evaluate_writes_what_every_retrieval_run_has(task, cached, tmp_path, monkeypatch):
    from components.evaluation.evaluate import EvaluateParams, evaluate
    from components.evaluation.summary import metrics_table

    monkeypatch.chdir(tmp_path)  # `work` lies here
    weights = train("hat", task, cached, tmp_path)
    evaluate(
        EvaluateParams(split="val", examples=1),
        run="tiny",
        task=task,
        weights=weights,
        evaluation=tmp_path / "evaluation" / "tiny",
    )
    assert {path.name for path in (tmp_path / "evaluation" / "tiny").iterdir()} == outs_of_evaluate()
    metrics = json.loads((tmp_path / "evaluation" / "tiny" / "metrics.json").read_text())
    assert set(metrics["scores"]) == {"i2t", "t2i", "ensemble"}
    for mine, shared in (("t2i", "itc"), ("ensemble", "itm")):
        assert {key: metrics["scores"][mine][key] for key in metrics[shared]} == pytest.approx(metrics[shared])
    assert metrics["labels"] == {"itc": "HAT (t-i)", "itm": "HAT*, ensemble"}
    table = metrics_table(tmp_path / "evaluation")
    assert [row[1] for row in table] == ["chance", "i2t", "t2i", "ensemble"]
    evaluate(
        EvaluateParams(split="val", examples=1, tower_candidates=3),
        run="few",
        task=task,
        weights=weights,
        evaluation=tmp_path / "few",
    )
    few = json.loads((tmp_path / "few" / "metrics.json").read_text())
    for name, first, changes in (("tiny", metrics, {}), ("few", few, {"tower_candidates": 3})):
        params = EvaluateParams(split="val", examples=1, pictures_per_part=2, **changes)
        evaluate(params, run=name, task=task, weights=weights, evaluation=tmp_path / "parts")
        assert json.loads((tmp_path / "parts" / "metrics.json").read_text()) == first
    assert few["candidates"] == 3
    assert len(json.loads((tmp_path / "few" / "extra" / "embedding.json").read_text())["captions"]) == 5
    assert np.isfinite(few["scores"]["ensemble"]["r_sum"])
    with pytest.raises(UserError, match="folds is 2, which does not divide the 5 pictures"):
        evaluate(EvaluateParams(split="val", folds=2), run="x", task=task, weights=weights, evaluation=tmp_path / "x")
    (weights / "model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="damaged or not of its"):
        evaluate(EvaluateParams(split="val"), run="x", task=task, weights=weights, evaluation=tmp_path / "x")


@pytest.mark.parametrize("kind", HEADS)
def test_words_are_explained_by_the_model_s_own_attention(kind, task, cached, tmp_path):
    weights = train(kind, task, cached, tmp_path)
    model, sizes = load_tower_model(weights, "cpu")
    reader, tokenizer = FeatureReader(cached / "val"), load_tokenizer(weights)
    records = feature_work.ShardReader(task / "val")
    picture = Image.open(io.BytesIO(records.image(0))).convert("RGB")
    caption = records.captions[0][0]
    if kind not in SCORES:
        with pytest.raises(ValueError, match="its words have no heat"):
            explain_towers(model, sizes, tokenizer, picture, caption)
        return
    shown = explain_towers(model, sizes, tokenizer, picture, caption)
    assert shown.match == pytest.approx(float(score_all(model.head, reader)[SCORES[kind]][0, 0]), abs=2e-2)
    regions, (words, mask) = reader.regions([0]), reader.words([0])
    if kind == "hat":
        assert [word.text for word in shown.words] == [
            f"{word}, level {level}" for word in caption.split() for level in (1, 2, 3)
        ]
        direction = model.head.directions["t2i"]
        image, text = direction.project_images(regions)[2], direction.project_texts(words)[2]
        attention = attention_weights(image, text, mask, "t2i")[0, 0, :, 1]  # of the first word, after [CLS]
        word = shown.words[2]
    else:
        assert [word.text for word in shown.words] == ["the whole caption", *caption.split()]
        vitr = model.head.vitr
        aligned = vitr.align(vitr.reason(regions[-1]), vitr.word_projection(words[-1]), mask)
        attention, word = heat_map(aligned.attention, mask)[0, 0], shown.words[0]
    corners = word.heat[[0, 0, -1, -1], [0, -1, 0, -1]]  # a 2 x 2 map, drawn large
    assert corners.argmax() == int(attention.argmax())
    assert corners[int(attention.argmin())] == corners.min()
    assert word.heat.max() == pytest.approx(1)


@pytest.mark.parametrize("kind", ["hat", "vitr"])
def test_candidates_alone_are_scored_as_all_are(kind, task, cached, tmp_path):
    model, _ = load_tower_model(train(kind, task, cached, tmp_path, epochs=1), "cpu")
    reader = FeatureReader(cached / "val")
    exact = score_all(model.head, reader)
    everything = score_candidates(model.head, reader, 1000, caption_block=3)
    few = score_candidates(model.head, reader, 2)
    assert exact.keys() == everything.image_to_text.keys()
    for name, matrix in exact.items():
        torch.testing.assert_close(everything.image_to_text[name], matrix, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(everything.text_to_image[name], matrix.T, atol=1e-5, rtol=1e-5)
        for scores, want, first in (
            (few.image_to_text[name], matrix, few.first),
            (few.text_to_image[name], matrix.T, few.first.T),
        ):
            inside = scores > OUTSIDE
            assert inside.sum(dim=1).tolist() == [2] * len(scores)
            torch.testing.assert_close(scores[inside], want[inside], atol=1e-5, rtol=1e-5)
            assert (first[inside].view(-1, 2).amin(dim=1) >= first.masked_fill(inside, -9).amax(dim=1)).all()


def test_an_approximate_index_gives_candidates_that_are_scored_alike(task, cached, tmp_path):
    model, _ = load_tower_model(train("vitr", task, cached, tmp_path, epochs=1), "cpu")
    reader = FeatureReader(cached / "val")
    every = score_all(model.head, reader)["vitr"]
    nearest = []
    for index in (EXACT, IndexSettings("approximate", 8, 1)):
        found = score_candidates(model.head, reader, 2, index=index)
        inside = found.image_to_text["vitr"] > OUTSIDE
        torch.testing.assert_close(found.image_to_text["vitr"][inside], every[inside], atol=1e-5, rtol=1e-5)
        nearest.append(found.first[inside].view(-1, 2).sort(dim=1).values)
    torch.testing.assert_close(*nearest, atol=1e-5, rtol=1e-5)  # so few vectors are all in reach; captions repeat


def test_the_same_run_gives_the_same_weights(task, cached, tmp_path):
    first = train("hat", task, cached, tmp_path / "a")
    second = train("hat", task, cached, tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_towers_rest_and_then_learn(task, cached, tmp_path):
    image, _ = feature_work.load_towers(cached)
    frozen, _ = load_tower_model(train("hat", task, cached, tmp_path / "a"), "cpu")
    changes = {"epochs": 2, "freeze_epochs": 1, "keep_weights": "last"}
    tuned, _ = load_tower_model(train("hat", task, cached, tmp_path / "b", **changes), "cpu")
    name = "conv_stem.weight"
    assert torch.equal(frozen.image.net.state_dict()[name], image.net.state_dict()[name])
    assert not torch.equal(tuned.image.net.state_dict()[name], image.net.state_dict()[name])
    assert torch.equal(tuned.image.net.state_dict()["bn1.running_mean"], image.net.state_dict()["bn1.running_mean"])


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_hat_s_pooled_score_learns_beside_its_directions(loss, task, cached, tmp_path):
    options = {"head": HEADS["hat"] | {"pooled": True, "dropout": 0.1}, "loss": loss}
    metrics = json.loads((train("hat", task, cached, tmp_path, **options) / "metrics.json").read_text())["last"]
    parts = [metrics[f"loss_{name}"] for name in ("i2t", "t2i", "similarity")]
    assert metrics["loss"] == pytest.approx(sum(parts), rel=1e-5)
    assert all(0 < part < 20 for part in parts)


@pytest.mark.parametrize(("kind", "learn"), [("hat", "text"), ("linear", "text"), ("vitr", "image")])
def test_one_tower_learns_beside_the_other_s_cached_features(kind, learn, task, cached, tmp_path):
    before = dict(zip(("image", "text"), feature_work.load_towers(cached), strict=True))
    changes = {"epochs": 2, "freeze_epochs": 1, "keep_weights": "last", "learn": [learn], "tower_rate": 0.5}
    weights = train(kind, task, cached, tmp_path, **changes)
    model, _ = load_tower_model(weights, "cpu")
    for name, tower in before.items():
        after = getattr(model, name).state_dict()
        same = all(torch.equal(value, after[key]) for key, value in tower.state_dict().items())
        assert same == (name != learn)
    assert np.isfinite(json.loads((weights / "metrics.json").read_text())["last"]["loss"])


def test_vitr_finds_harder_negatives_in_a_pool(task, cached, tmp_path):
    """With all of train as the pool, each step's loss is at least the batch's own; drawn anew it is the same."""
    losses = {}
    for pool in (0, 18, 18):
        weights = train("vitr", task, cached, tmp_path / f"{pool}-{len(losses)}", negative_pool=pool, epochs=1)
        losses.setdefault(pool, []).append((weights / "model.safetensors").read_bytes())
        losses[pool].append(json.loads((weights / "metrics.json").read_text())["first"]["loss_lseh"])
    assert losses[18][1] > losses[0][1]
    assert losses[18][0] == losses[18][2]
    with pytest.raises(ValueError, match="negative_pool reads cached features"):
        train("vitr", task, cached, tmp_path, negative_pool=4, freeze_epochs=1)


@pytest.mark.parametrize("kind", ["hat", "linear"])
def test_only_the_text_s_upper_layers_learn(kind, task, cached, tmp_path):
    _, before = feature_work.load_towers(cached)
    changes = {"freeze_epochs": 1, "keep_weights": "last", "learn": ["text"], "learn_above": 1}
    weights = train(kind, task, cached, tmp_path / "a", **changes)
    after = load_tower_model(weights, "cpu")[0].text.state_dict()
    changed = {name for name, value in before.state_dict().items() if not torch.equal(value, after[name])}
    assert changed
    assert all(name.startswith(("net.encoder.layer.1.", "net.encoder.layer.2.")) for name in changed)
    rested = train(kind, task, cached, tmp_path / "b", epochs=1, **changes | {"freeze_epochs": 1})
    after = load_tower_model(rested, "cpu")[0].text.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())
    with pytest.raises(UserError, match=r"tiny.learn_above does not fit .*: above level 3 of 3 there is none"):
        train(kind, task, cached, tmp_path / "c", **changes | {"learn_above": 3})


def test_mirror_images_are_kept_and_seen_where_no_side_is_named(task, shards, cached, tmp_path):
    runtime = Runtime(work=tmp_path / "work", processes=1)
    params = feature_params(task, shards, mirrored=True)
    features(params, towers="tiny", task=task, features=tmp_path / "both", runtime=runtime)
    reader, records = FeatureReader(tmp_path / "both" / "train"), feature_work.ShardReader(task / "train")
    image, _ = feature_work.load_towers(cached)
    turned = np.array([False, True, True])
    want = image(torch.stack([feature_work.view(records, picture, 64) for picture in (0, 0, 5)]).float() / 255)
    mirror = image(
        torch.stack([feature_work.view(records, picture, 64).flip(2) for picture in (0, 0, 5)]).float() / 255
    )
    for level, plain, other in zip(reader.regions([0, 0, 5], turned), want, mirror, strict=True):
        expected = torch.where(torch.from_numpy(turned)[:, None, None], other, plain)
        torch.testing.assert_close(level, expected.detach(), atol=5e-3, rtol=5e-3)
    assert not FeatureReader(tmp_path / "both" / "val").mirrored

    def data(**changes):
        augment = AugmentParams(**{"crop_scale": (1.0, 1.0), "randaugment_operations": 0} | changes)
        options = {"image_size": 64, "max_tokens": 16, "augment": augment, "seed": 0}
        return FeatureData(tmp_path / "both", task / "train", freeze_epochs=9, **options)

    drawn = [data()._mirrored(Draw(epoch, tuple(range(18)))) for epoch in range(20)]
    sides = np.array(["left" in caption or "right" in caption for caption in reader.captions])
    assert sides.any(), "else this shows nothing"
    assert not any(one[sides].any() for one in drawn)
    assert 0.4 < np.mean([one[~sides].mean() for one in drawn]) < 0.6
    assert not data(flip=False)._mirrored(Draw(0, tuple(range(18)))).any()
    for pooled in (False, True):
        given = data(flip_with_sides=True)
        given.pooled = pooled
        draw = Draw(3, tuple(range(18)))
        seen, turned = given[draw].regions[-1].mean(dim=1), given._mirrored(draw)
        assert turned.any()
        torch.testing.assert_close(seen, reader.regions(reader.picture_of, turned)[-1].mean(dim=1))


@pytest.mark.parametrize("fresh", [("image", "text"), ("image",), ("text",), ()])
def test_a_batch_scores_the_same_from_features_and_from_what_towers_read(fresh, task, cached):
    augment = AugmentParams(crop_scale=(1.0, 1.0), flip=False, randaugment_operations=0)
    data = FeatureData(
        cached, task / "train", freeze_epochs=1, learn=fresh, image_size=64, max_tokens=16, augment=augment, seed=0
    )
    image, text = feature_work.load_towers(cached)
    torch.manual_seed(0)
    head = make_head("hat", HatHeadConfig(width=8), image.widths, text.widths)
    model = TowerModel(head, image, text).eval()
    batches = [data[Draw(epoch, (0, 3, 7, 12))] for epoch in (0, 1)]
    scores = []
    for batch in batches:
        images = batch.images.float() / 255 if len(batch.images) else None
        ids = batch.input_ids if batch.input_ids.shape[1] else None
        scores.append(model(batch.regions, batch.words, batch.mask, images, ids))
    assert (len(batches[1].images) > 0, batches[1].input_ids.shape[1] > 0) == ("image" in fresh, "text" in fresh)
    for name, expected in scores[0].items():
        torch.testing.assert_close(scores[1][name], expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocabulary": "package:no_such_package/x"}, "no_such_package, which is not installed"),
        ({"vocabulary": "nowhere/vocab.txt"}, "nowhere/vocab.txt does not exist"),
        ({"text": TOWERS["text"] | {"vocab_size": 20}}, "set text.vocab_size"),
        ({"image": TOWERS["image"] | {"model": "vgg99"}}, "the towers cannot be made: timm cannot make vgg99"),
        ({"splits": ["train", "dev"]}, "dev does not exist"),
        ({"semantic_values": 100}, "semantic_values does not fit"),
    ],
)
def test_what_cannot_be_extracted_is_said(changes, said, task, shards, tmp_path):
    with pytest.raises(UserError, match=said):
        features(
            feature_params(task, shards, **changes),
            towers="tiny",
            task=task,
            features=tmp_path / "out",
            runtime=Runtime(work=tmp_path / "work", processes=1),
        )


def test_weights_are_never_unpickled(task, shards, tmp_path):
    import pickle

    (tmp_path / "evil.pth").write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(UserError, match="could run code"):
        features(
            feature_params(task, shards, image_weights=str(tmp_path / "evil.pth")),
            towers="tiny",
            task=task,
            features=tmp_path / "out",
            runtime=Runtime(work=tmp_path / "work", processes=1),
        )


def test_runs_say_what_they_lack(task, cached, tmp_path):
    with pytest.raises(UserError, match="run the stage features"):
        train("hat", task, tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"finetune.runs.tiny.head does not fit .*levels names 4"):
        train("hat", task, cached, tmp_path, head={"levels": [4]})
    bare = shutil.copytree(cached, tmp_path / "bare")
    (bare / "train" / "semantic.npy").unlink()
    with pytest.raises(UserError, match="semantic_values"):
        train("vitr", task, bare, tmp_path)
    shutil.rmtree(bare / "train")
    shutil.copytree(cached / "val", bare / "train")
    with pytest.raises(UserError, match="was not made from"):
        train("hat", task, bare, tmp_path)
