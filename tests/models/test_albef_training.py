"""Both training models at a tiny size whose image and text widths differ."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.albef.checkpoints import student_state_dict
from models.albef.config import AlbefConfig
from models.albef.losses import Negatives
from models.albef.model import Albef
from models.albef.momentum import update_teacher
from models.albef.pretraining import AlbefPretraining
from models.albef.retrieval import AlbefRetrieval

CONFIG = AlbefConfig(
    image_size=16,
    patch_size=8,
    vision_width=24,
    vision_depth=2,
    vision_heads=2,
    vocab_size=120,
    text_width=16,
    text_layers=3,
    fusion_layers=1,
    text_heads=2,
    text_intermediate=32,
    max_positions=12,
    text_dropout=0.0,
    embed_dim=8,
    queue_size=10,
)


def batch(rows: int, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(104, 120, (rows, length), generator=generator)
    ids[:, 0], ids[:, -1] = CONFIG.cls_id, CONFIG.sep_id
    return {
        "images": torch.randn(rows, 3, 16, 16, generator=generator),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pretraining(**changes: Any) -> AlbefPretraining:
    torch.manual_seed(0)
    return AlbefPretraining(AlbefConfig.model_validate(CONFIG.model_dump() | changes))


def retrieval(**changes: Any) -> AlbefRetrieval:
    torch.manual_seed(0)
    return AlbefRetrieval(AlbefConfig.model_validate(CONFIG.model_dump() | changes))


def test_teacher_starts_equal_and_no_gradient_reaches_it() -> None:
    model = pretraining()
    student = student_state_dict(model)
    for name, value in model.teacher.state_dict().items():
        assert torch.equal(value, student[name])
    model(**batch(4), alpha=0.4, generator=seeded()).loss.backward()
    assert all(p.grad is None for p in model.teacher.parameters())
    assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("teacher."))


def test_teacher_moves_by_the_momentum_before_it_speaks() -> None:
    model = pretraining(momentum=0.75)
    with torch.no_grad():
        model.vision_proj.weight.fill_(1.0)
        model.teacher.vision_proj.weight.fill_(3.0)
    model(**batch(4), alpha=0.0, generator=seeded())
    assert torch.allclose(model.teacher.vision_proj.weight, torch.tensor(2.5))
    with torch.no_grad():
        spoken = model.teacher.encode_image(batch(4)["images"]).feature
    assert torch.equal(model.queue.images[:, :4].T, spoken)


def test_zero_momentum_copies_the_student() -> None:
    model = pretraining()
    with torch.no_grad():
        model.itm_head.weight.fill_(2.0)
        model.text_proj.weight.fill_(2.0)
    update_teacher(model.teacher, model, momentum=0.0)
    assert torch.equal(model.teacher.text_proj.weight, model.text_proj.weight)


def test_each_loss_has_its_own_share_of_the_teacher() -> None:
    """Table 1 distils ITC alone, then MLM too: each loss is that of a step in which both have its share."""
    losses = {}
    for alpha, mlm_alpha in ((0.0, None), (0.4, None), (0.4, 0.0), (0.0, 0.4)):
        out = pretraining()(**batch(4), alpha=alpha, mlm_alpha=mlm_alpha, generator=seeded())
        losses[alpha, mlm_alpha] = (out.loss_itc.item(), out.loss_mlm.item())
    assert losses[0.4, 0.0] == (losses[0.4, None][0], losses[0.0, None][1])
    assert losses[0.0, 0.4] == (losses[0.0, None][0], losses[0.4, None][1])
    assert losses[0.0, None][0] != losses[0.4, None][0]
    assert losses[0.0, None][1] != losses[0.4, None][1]


def test_steps_lower_every_loss() -> None:
    model = pretraining()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batch(6)
    first = last = model(**data, alpha=0.0, generator=seeded())
    for _ in range(60):
        last = model(**data, alpha=0.0, generator=seeded())
        optimizer.zero_grad()
        last.loss.backward()
        optimizer.step()
    for name in ("loss_itc", "loss_itm", "loss_mlm"):
        assert getattr(last, name) < 0.8 * getattr(first, name), name


def test_same_generator_same_losses() -> None:
    first, again, other = (pretraining()(**batch(5), alpha=0.4, generator=seeded(s)).loss for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_batches_that_do_not_divide_the_queue() -> None:
    model = pretraining()
    for step in range(4):
        model(**batch(4, seed=step), alpha=0.4, generator=seeded())
    assert int(model.queue.pointer) == 16 % CONFIG.queue_size
    model(**batch(13), alpha=0.4, generator=seeded())  # more rows than the queue holds


def test_one_row_has_no_negative_and_no_itm() -> None:
    model = pretraining()
    output = model(**batch(1), alpha=0.4, generator=seeded())
    output.loss.backward()
    assert output.loss_itm.item() == 0
    assert output.loss_itc.item() > 0
    assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("teacher."))


def test_a_batch_of_one_picture_has_no_itm() -> None:
    output = retrieval()(**batch(3), image_ids=torch.tensor([5, 5, 5]), alpha=0.4, generator=seeded())
    assert output.loss_itm.item() == 0
    assert output.negatives.possible is not None
    assert not output.negatives.possible.any()


def test_captions_of_one_picture_share_the_target() -> None:
    data, ids = batch(3), torch.tensor([4, 4, 9])
    model = retrieval(momentum=1.0)  # a teacher that stands still
    model(**data, image_ids=ids, alpha=0.0, generator=seeded())
    queued = torch.cat([model.queue.images, model.queue.texts]).clone()
    output = model(**data, image_ids=ids, alpha=0.0, generator=seeded())
    with torch.no_grad():
        image = model.encode_image(data["images"]).feature
        text = model.encode_text(data["input_ids"], data["attention_mask"]).feature
    images, texts = queued.chunk(2)
    losses = []
    for own, other, queue in ((image, text, texts), (text, image, images)):  # the teacher still equals the student
        log_p = (own @ torch.cat([other.T, queue], dim=1) / model.temp).log_softmax(1)
        # Columns 0 to 2 are the batch, 3 to 5 the same rows from the step before.
        positives = [log_p[0, [0, 1, 3, 4]], log_p[1, [0, 1, 3, 4]], log_p[2, [2, 5]]]
        losses.append(-torch.stack([p.mean() for p in positives]).mean())
    assert torch.allclose(output.loss_itc, (losses[0] + losses[1]) / 2, atol=1e-5)


def test_one_pass_over_3b_texts_equals_three_passes() -> None:
    model, data = pretraining(), batch(4)
    negatives = Negatives(torch.tensor([1, 2, 3, 0]), torch.tensor([2, 3, 0, 0]))
    output = model(**data, alpha=0.0, generator=seeded(), negatives=negatives)
    mask = data["attention_mask"]
    image, text = model.encode_image(data["images"]).tokens, model.encode_text(data["input_ids"], mask).tokens
    logits = [
        model.match(image, text, mask),
        model.match(image[negatives.image_per_text], text, mask),
        model.match(image, text[negatives.text_per_image], mask[negatives.text_per_image]),
    ]
    labels = torch.tensor([1] * 4 + [0] * 8)
    assert torch.allclose(output.loss_itm, torch.nn.functional.cross_entropy(torch.cat(logits), labels), atol=1e-6)


def test_padding_changes_nothing() -> None:
    model, data = pretraining().eval(), batch(3)
    wider = torch.nn.functional.pad(data["input_ids"], (0, 4), value=CONFIG.pad_id)
    mask = torch.nn.functional.pad(data["attention_mask"], (0, 4))
    with torch.no_grad():
        image = model.encode_image(data["images"]).tokens
        short = model.encode_text(data["input_ids"], data["attention_mask"])
        long = model.encode_text(wider, mask)
        assert torch.allclose(short.feature, long.feature, atol=1e-6)
        matches = model.match(image, short.tokens, data["attention_mask"]), model.match(image, long.tokens, mask)
        assert torch.allclose(*matches, atol=1e-6)


def test_dropout_acts_in_training_alone() -> None:
    model, data = Albef(CONFIG.model_copy(update={"text_dropout": 0.5})), batch(2)
    tokens = {k: v for k, v in data.items() if k != "images"}
    assert not torch.equal(model.encode_text(**tokens).tokens, model.encode_text(**tokens).tokens)
    model.eval()
    assert torch.equal(model.encode_text(**tokens).tokens, model.encode_text(**tokens).tokens)


def test_temperature_is_clamped() -> None:
    model = pretraining()
    with torch.no_grad():
        model.temp.fill_(-1.0)
    model(**batch(2), alpha=0.0, generator=seeded())
    assert model.temp.item() == pytest.approx(CONFIG.temperature_min)


def test_global_pool_in_one_process_equals_the_local_one() -> None:
    local, everyone = (
        pretraining(negative_pool=pool)(**batch(4), alpha=0.4, generator=seeded()) for pool in ("local", "global")
    )
    assert torch.allclose(local.loss, everyone.loss, atol=1e-6)
    assert torch.equal(local.negatives.text_per_image, everyone.negatives.text_per_image)


def test_half_precision_keeps_similarities_full() -> None:
    model = pretraining()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch(4), alpha=0.4, generator=seeded())
    assert output.similarity_i2t.dtype == torch.float32
    output.loss.backward()
    assert output.loss.isfinite()


def spoil_picture(model: AlbefPretraining, data: dict[str, Tensor]) -> None:
    data["images"][2, 0, 0, 0] = torch.nan


def spoil_weight(model: AlbefPretraining, data: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model.text_proj.weight[0, 0] = torch.inf


def spoil_range(model: AlbefPretraining, data: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model.text_proj.weight.fill_(3e38)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (spoil_picture, r"input pictures in rows \[2\]"),
        (spoil_weight, "weights text_proj.weight .*learning rate"),
        (spoil_range, "text features in rows"),
    ],
)
def test_what_is_not_finite_is_named(spoil: Any, cause: str) -> None:
    model, data = pretraining(), batch(4)
    before = model.queue.images.clone()
    spoil(model, data)
    with pytest.raises(FloatingPointError, match=cause):
        model(**data, alpha=0.4, generator=seeded())
    assert torch.equal(model.queue.images, before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": torch.zeros(4, 3, 16, 24)}, r"images must be \(B, 3, 16, 16\), not \(4, 3, 16, 24\)"),
        ({"images": torch.zeros(4, 16, 16)}, "images must be"),
        ({"images": torch.zeros(3, 3, 16, 16)}, "3 images, 4 texts"),
        ({"attention_mask": torch.ones(4, 6)}, "input_ids and attention_mask must both be"),
        ({"alpha": 1.5}, "alpha=1.5 must lie"),
        ({"masked_ids": torch.zeros(4, 7)}, "together or neither"),
        ({"masked_ids": torch.zeros(4, 7), "mlm_labels": torch.zeros(4, 6)}, "shape of input_ids"),
    ],
)
def test_wrong_shapes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pretraining()(**(batch(4) | {"alpha": 0.0, "generator": seeded()} | changes))


def test_wrong_image_ids_and_long_texts_are_named() -> None:
    with pytest.raises(ValueError, match="do not pair up"):
        retrieval()(**batch(4), image_ids=torch.arange(3), alpha=0.0)
    with pytest.raises(ValueError, match="13 tokens are more than max_positions=12"):
        pretraining()(**batch(2, length=13), alpha=0.0)
    model, data = retrieval(), batch(3)
    text = model.encode_text(data["input_ids"], data["attention_mask"]).tokens
    with pytest.raises(ValueError, match="give image_rows"):
        model.match(torch.zeros(1, CONFIG.image_tokens, 24), text, data["attention_mask"])
    with pytest.raises(RuntimeError, match="without its MLM head"):
        model.text_encoder.predict_tokens(text)
