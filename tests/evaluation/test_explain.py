"""Per-word heat maps of one picture: as Grad-CAM has them, drawn as a sheet and as a page."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from components.data.tokenizer import bert_tokenizer, load_tokenizer
from components.evaluation.explain import Explanation, Word, explain, overlay, panels, write
from components.evaluation.grounding import default_layer
from components.evaluation.weights import load_model
from components.io.errors import UserError
from components.training.augment import evaluation_view, normalise, to_batch
from models.albef.gradcam import gradcam_itm
from tests.evaluation import made_stages as made
from tests.evaluation.tiny_albef import save_albef

SENTENCE = "a red cube upon spheres"
PIECES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cube", "upon", "sphere", "##s")


def save_model(folder, fusion_layers):
    tokenizer = bert_tokenizer({piece: place for place, piece in enumerate(PIECES)})
    layers = {"text_layers": fusion_layers + 1, "fusion_layers": fusion_layers}
    save_albef(folder, tokenizer, patch_size=8, init_std=0.3, **layers)
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    save_model(folder, fusion_layers=3)
    colours = np.random.default_rng(0).integers(0, 255, (5, 7, 3), np.uint8)
    Image.fromarray(colours).resize((70, 50)).save(folder / "picture.png")
    return folder


@pytest.fixture(scope="module")
def explained(folder):
    return explain(folder / "picture.png", SENTENCE, folder)


def test_words_have_the_heat_of_their_pieces(folder, explained) -> None:
    assert [word.text for word in explained.words] == SENTENCE.split(), "pieces are put together, special ones left out"
    model, config = load_model(folder)
    images = normalise(to_batch([evaluation_view(explained.picture, config.image_size)]))
    tokenizer = load_tokenizer(folder)
    ids, mask = tokenizer.encode_batch([SENTENCE], 30)
    maps = gradcam_itm(model, images, ids, mask, 2)[0]  # layers 1 to 3 fuse; the last has no heat for words
    assert tokenizer.tokens(ids[0].tolist())[5:7] == ["sphere", "##s"]
    mean = maps[5:7].mean(dim=0)
    heat = explained.words[-1].heat
    assert heat.shape == (50, 70)
    assert (heat.min() >= 0, heat.max()) == (True, 1.0)
    small = torch.nn.functional.interpolate(mean[None, None], size=(50, 70), mode="bicubic")[0, 0].clamp(min=0)
    assert heat == pytest.approx((small / small.max()).numpy(), abs=1e-5)
    assert 0 < explained.match < 1


def test_the_same_call_draws_the_same_bytes(folder, explained, tmp_path) -> None:
    write(explained, tmp_path / "one.png")
    write(explain(folder / "picture.png", SENTENCE, folder), tmp_path / "other.png")
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()
    with Image.open(tmp_path / "one.png") as sheet:
        assert sheet.size[0] > 4 * 200, "four pictures beside each other, small ones enlarged"


def test_a_page_escapes_its_words(tmp_path) -> None:
    heat = np.zeros((4, 4), np.float32)
    shown = Explanation(Image.new("RGB", (4, 4)), "<script>alert(1)</script>", (Word('"><img src=x>', heat),), 0.5)
    write(shown, tmp_path / "heat.html")
    text = (tmp_path / "heat.html").read_text()
    assert "<script" not in text
    assert "<img src=x" not in text
    assert text.count("data:image/png;base64,") == 2
    write(shown, tmp_path / "heat.png")


def test_heat_colours_only_where_it_is() -> None:
    picture = Image.new("RGB", (4, 4), (100, 100, 100))
    heat = np.zeros((4, 4), np.float32)
    heat[1, 2] = 1.0
    changed = (np.asarray(overlay(picture, heat)) != 100).any(axis=2)
    assert np.argwhere(changed).tolist() == [[1, 2]]
    cold = Explanation(picture, "x", (Word("x", np.zeros((4, 4), np.float32)),), 0.5)
    assert np.array_equal(*(np.asarray(image) for _, image in panels(cold)))


def test_bad_input_is_said_in_a_sentence(folder, explained, tmp_path) -> None:
    picture = folder / "picture.png"
    (tmp_path / "no.jpg").write_bytes(b"<svg onload='alert(1)'/>")
    sink = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(sink, "PNG")
    (tmp_path / "bomb.png").write_bytes(sink.getvalue())
    for arguments, options, message in (
        ((tmp_path / "none.jpg", "x", folder), {}, "cannot be read"),
        ((tmp_path / "no.jpg", "x", folder), {}, "is no picture that can be used"),
        ((tmp_path / "bomb.png", "x", folder), {}, "image too large"),
        ((picture, " . ", folder), {}, "holds no word to read"),
        ((picture, "x", tmp_path), {}, "does not exist: run the stage"),
        ((picture, "x", folder), {"layer": 0}, "does not attend to the image"),
        ((picture, "x", folder), {"layer": 3}, "in the last layer, 3, only"),
        ((picture, "x", folder), {"max_tokens": 41}, "reads at most 40 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            explain(*arguments, **options)
    with pytest.raises(UserError, match=r"neither \.png nor \.html"):
        write(explained, tmp_path / "heat.pdf")


def test_the_report_shows_words_of_runs_that_have_them(tmp_path) -> None:
    made.make_evaluation(tmp_path)
    (tmp_path / "models" / "task").mkdir(parents=True)
    assert "Words in pictures" not in made.build_report(tmp_path), "no weights"
    save_model(tmp_path / "models" / "task", fusion_layers=3)
    text = made.build_report(tmp_path)
    assert text.count('<ul class="gallery heat">') == 2
    assert text.count('alt="Heat of the word ') > 4
    assert "<script" not in text
    assert made.build_report(tmp_path) == text, "the same bytes again"
    assert "Words in pictures" not in made.build_report(tmp_path, max_explained=0)
    save_model(tmp_path / "models" / "task", fusion_layers=1)
    assert "Words in pictures" not in made.build_report(tmp_path), "one layer that fuses has no heat for words"


@pytest.mark.parametrize(("fusion_layers", "layer"), [(1, 1), (2, 1), (3, 2), (6, 3)])
def test_the_layer_is_the_third_that_fuses_but_never_the_last_of_several(tmp_path, fusion_layers, layer):
    save_model(tmp_path, fusion_layers)
    model, _ = load_model(tmp_path, "cpu", None)
    assert default_layer(model, "itm") == layer
