from itertools import pairwise

import pytest
from pydantic import ValidationError

from components.io.errors import UserError
from components.training.finetune import FinetuneParams, RetrievalRun
from components.training.pretrain import PretrainParams
from components.training.schedule import check_warmup, learning_rate, ramped_alpha
from components.training.settings import ScheduleParams, TrainingParams


def test_defaults_are_valid_and_json():
    params = PretrainParams()
    assert PretrainParams.model_validate_json(params.model_dump_json(exclude={"model"})) == params
    assert RetrievalRun(task="data/tasks/x").schedule.lr == 1e-5


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (TrainingParams, {"batch_size": 6, "num_workers": 4}, "shared equally by num_workers"),
        (TrainingParams, {"batch_size": 4, "num_workers": 4}, "no negative"),
        (TrainingParams, {"batch_size": 1}, "greater than or equal to 2"),
        (TrainingParams, {"schedule": {"lr": 1e-5, "min_lr": 1e-4}}, "min_lr 0.0001 is above lr"),
        (TrainingParams, {"schedule": {"lr": 1e-6, "min_lr": 0, "warmup_lr": 1e-5}}, "warmup_lr 1e-05 is above lr"),
        (TrainingParams, {"schedule": {"warmup_iterations": 150}}, "no multiple of warmup_step_size"),
        (TrainingParams, {"augment": {"crop_scale": [1.0, 0.2]}}, "smaller number comes first"),
        (TrainingParams, {"augment": {"crop_scale": [0.0, 0.2]}}, "greater than 0"),
        (PretrainParams, {"model": {"vocab_size": 30522}}, "comes from the tokenizer"),
        (PretrainParams, {"model": {"max_positions": 20}, "max_tokens": 25}, "above model.max_positions"),
        (FinetuneParams, {"runs": {"pretrain": {"task": "x"}}}, "cannot be called pretrain"),
        (FinetuneParams, {"runs": {"a/b": {"task": "x"}}}, "match pattern"),
        (RetrievalRun, {"task": "x", "validate_epochs": False}, "needs validate_epochs"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(model, values, message):
    with pytest.raises(ValidationError, match=message):
        model.model_validate(values)


def test_the_rate_by_iteration_rises_then_falls_to_the_end():
    params = ScheduleParams(kind="cosine_by_iteration", lr=1.0, min_lr=0.1, warmup_lr=0.2, warmup_iterations=4)
    rates = [learning_rate(params, step // 5, step % 5, per_epoch=5, steps=20, epochs=4) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(later < earlier for earlier, later in pairwise(rates[4:]))
    assert rates[12] == pytest.approx(0.55)  # half-way between step 4 and step 20
    assert 0.1 < rates[-1] < 0.12


@pytest.mark.parametrize(
    ("kind", "every", "expected"),
    [("step", 2, [1, 1, 0.1, 0.1, 0.01, 0.01]), ("late_decay", 4, [1, 1, 1, 1, 0.1, 0.1])],  # HAT's and VITR's shapes
)
def test_rates_that_fall_by_epoch_do_not_depend_on_how_many_there_are(kind, every, expected):
    params = ScheduleParams(kind=kind, lr=1.0, warmup_iterations=0, decay_epochs=every)
    for epochs in (6, 60):
        rates = [
            learning_rate(params, epoch, place, per_epoch=3, steps=3 * epochs, epochs=epochs)
            for epoch in range(6)
            for place in (0, 2)
        ]
        assert rates == pytest.approx([rate for rate in expected for _ in range(2)])


def test_alpha_ramps_over_the_first_epoch_only():
    assert [ramped_alpha(0.4, True, 0, iteration, 4) for iteration in range(4)] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert ramped_alpha(0.4, True, 1, 0, 4) == 0.4
    assert ramped_alpha(0.4, False, 0, 0, 4) == 0.4


@pytest.mark.parametrize(("kind", "room"), [("cosine_by_epoch", 200), ("cosine_by_iteration", 600)])
def test_a_warm_up_longer_than_its_room_is_refused(kind, room):
    def check(iterations):
        params = ScheduleParams(kind=kind, warmup_iterations=iterations)
        check_warmup(params, per_epoch=200, steps=600, section="pretrain")

    check(room - 100)
    with pytest.raises(UserError, match=rf"pretrain\.schedule.warmup_iterations is {room}, .* only {room} iterations"):
        check(room)
