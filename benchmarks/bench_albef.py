"""One ALBEF pre-training step at full size on the CPU, by part, and what each of three means saves of it.

    PYTHONPATH=. python benchmarks/bench_albef.py [--rounds 3] [--batch 8] [--threads 1] [--tiny]

ViT-B/16 at 256 px, BERT-base, float32, published dropout, AdamW; alpha is 0.4, so the teacher speaks for MLM too. The
three means are fused attention, the vocabulary head at masked positions only, and a picture's cross-attention keys and
values computed once for all texts of the step; each is turned off alone, then all three. Variants take turns in each
round; seconds are the process's own, medians, so that others on the machine disturb little.

It is the real step that runs: clocks are wrapped around the model's own methods, and gradient hooks at the parts'
outputs say when backward goes from one part to the next. Before anything is timed, the step without fused attention and
without shared keys and values must give the same losses.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from components.training.optimisers import Stepper, make_optimizer
from components.training.settings import TrainingParams
from models.albef import distilled
from models.albef.config import AlbefConfig
from models.albef.pretraining import AlbefPretraining, PretrainingOutput

PARTS = ("encoders", "teacher", "fusion", "heads", "optimiser")
VARIANTS = {  # name: attention is fused, vocabulary head at masked positions only, keys and values are shared
    "all three": (True, True, True),
    "attention not fused": (False, True, True),
    "vocabulary head everywhere": (True, False, True),
    "keys and values per text": (True, True, False),
    "none of them": (False, False, False),
}
TINY = {"image_size": 32, "vision_width": 24, "vision_depth": 2, "vision_heads": 2, "vocab_size": 200}
TINY |= {"text_width": 24, "text_layers": 2, "fusion_layers": 1, "text_heads": 2, "text_intermediate": 48}
TINY |= {"embed_dim": 8, "queue_size": 64}
TOKENS = 25  # as many as the published training reads


class Clock:
    """Seconds by part; what no other part claims is the heads'."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.part, self.since = "heads", time.process_time()

    def turn(self, part: str) -> str:
        """From now on it is `part`'s time; gives the part before."""
        now, before = time.process_time(), self.part
        self.seconds[before] += now - self.since
        self.part, self.since = part, now
        return before


@contextmanager
def watched(model: AlbefPretraining) -> Iterator[Clock]:
    """A clock around the model's parts, forward and backward, within the context."""
    clock = Clock()

    def timed(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before = clock.turn(part)
            result = method(*args, **kwargs)
            clock.turn(before)
            if before == "heads":  # else it is a part of a part
                for tensor in result if isinstance(result, tuple) else (result,):
                    if isinstance(tensor, Tensor) and tensor.requires_grad:
                        tensor.register_hook(lambda _: clock.turn(part) and None)
            return result

        return wrapper

    owners: list[tuple[Any, str, str]] = [
        (model, "encode_image", "encoders"),
        (model, "encode_text", "encoders"),
        (model.text_encoder.bert, "encode", "encoders"),
        (model, "fuse", "fusion"),
        (model.text_encoder, "predict_tokens", "heads"),
        (model, "align", "heads"),
        (model, "matching_loss", "heads"),
        (model.teacher, "encode_image", "teacher"),
        (model.teacher, "encode_text", "teacher"),
        (model.teacher.text_encoder.bert, "encode", "teacher"),
        (model.teacher, "fuse", "teacher"),
        (model.teacher.text_encoder, "predict_tokens", "teacher"),
    ]
    update = distilled.update_teacher
    distilled.update_teacher = timed("teacher", update)
    for owner, name, part in owners:
        setattr(owner, name, timed(part, getattr(owner, name)))
    try:
        yield clock
    finally:
        distilled.update_teacher = update
        for owner, name, _ in owners:
            delattr(owner, name)  # what was set hides the class's own method


@contextmanager
def means(model: AlbefPretraining, fused: bool, shared: bool) -> Iterator[None]:
    """The model with fused attention or without, and with keys and values shared by a picture's texts or not."""

    def per_text(texts: Tensor, mask: Tensor, images: Tensor, rows: Tensor | None = None) -> Tensor:
        return fuse(texts, mask, images if rows is None else images[rows])

    bert = model.text_encoder.bert
    fuse = bert.fuse
    attentions = [module for module in model.modules() if hasattr(module, "fused_attn")]
    before = [module.fused_attn for module in attentions]
    for module in attentions:
        module.fused_attn = fused
    if not shared:
        bert.fuse = per_text
    try:
        yield
    finally:
        for module, value in zip(attentions, before, strict=True):
            module.fused_attn = value
        if not shared:
            del bert.fuse


def make_batch(config: AlbefConfig, rows: int) -> dict[str, Tensor]:
    """Random pictures and captions of 12 to 25 tokens, padded."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, TOKENS + 1, (rows, 1), generator=generator)
    lengths[0] = TOKENS
    mask = (torch.arange(TOKENS) < lengths).long()
    ids = torch.randint(104, config.vocab_size, (rows, TOKENS), generator=generator) * mask
    ids[:, 0] = config.cls_id
    images = torch.randn(rows, 3, config.image_size, config.image_size, generator=generator)
    return {"images": images, "input_ids": ids, "attention_mask": mask}


def run(model: AlbefPretraining, batch: dict[str, Tensor], masked_only: bool = True) -> PretrainingOutput:
    """The losses; without `masked_only` every position has a label, so the head answers for all of them."""
    draws = {} if masked_only else {"masked_ids": batch["input_ids"], "mlm_labels": batch["input_ids"]}
    return model(**batch, alpha=0.4, generator=torch.Generator().manual_seed(1), **draws)


def check_equal(model: AlbefPretraining, batch: dict[str, Tensor]) -> float:
    """The largest difference of a loss with the naive ways; the model must not move meanwhile."""
    losses = []
    for fused, shared in ((True, True), (False, False)):
        with means(model, fused, shared), torch.no_grad():
            state = {name: value.clone() for name, value in model.queue.state_dict().items()}
            out = run(model, batch)
            model.queue.load_state_dict(state)
            losses.append(torch.stack([out.loss_itc, out.loss_itm, out.loss_mlm]))
    difference = float((losses[0] - losses[1]).abs().max())
    assert difference < 1e-4, difference
    return difference


def one_step(
    model: AlbefPretraining, stepper: Stepper, batch: dict[str, Tensor], ways: tuple[bool, bool, bool]
) -> dict[str, float]:
    fused, masked_only, shared = ways
    with means(model, fused, shared), watched(model) as clock:
        loss = run(model, batch, masked_only).loss
        stepper.backward(loss)
        clock.turn("optimiser")
        stepper.step(1e-5)
        clock.turn("heads")
    return clock.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to show that the script works")
    arguments = parser.parse_args()
    config = AlbefConfig.model_validate(TINY) if arguments.tiny else AlbefConfig()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model: AlbefPretraining = AlbefPretraining(config)
    params = TrainingParams(batch_size=arguments.batch)
    stepper = Stepper(make_optimizer(model, params), params, torch.device("cpu"))
    batch = make_batch(config, arguments.batch)
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {torch.get_num_threads()} threads, batch of", end=""
    )
    print(f" {arguments.batch}; losses differ from the naive ways' by {check_equal(model.eval(), batch):.0e} at most")
    model.train()
    one_step(model, stepper, batch, VARIANTS["all three"])  # the first step makes the optimiser's averages
    times: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.rounds):
        for name, ways in VARIANTS.items():
            times[name].append(one_step(model, stepper, batch, ways))
    print(f"\n{'own seconds, forward and backward':34}" + "".join(f"{part:>10}" for part in (*PARTS, "step", "ratio")))
    whole = {name: statistics.median(sum(step.values()) for step in steps) for name, steps in times.items()}
    for name, steps in times.items():
        parts = [statistics.median(step[part] for step in steps) for part in PARTS]
        row = "".join(f"{value:10.2f}" for value in (*parts, whole[name], whole[name] / whole["all three"]))
        print(f"{name:34}{row}")


if __name__ == "__main__":
    main()
