"""Whether a checkpoint belongs to the training that found it: what may differ, and what is said where it may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.io.errors import UserError
from components.training.settings import HOW, TrainingParams

LENGTH = ("epochs", "max_steps")  # may differ: a longer training goes on from a shorter one


def describe(params: TrainingParams, data: str) -> dict[str, Any]:
    """What a training is: its parameters by dotted key, without those of how it runs, and the version of its data."""
    return {**_flat(params.model_dump(mode="json", exclude=set(HOW))), "data": data}


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], *, section: str, place: str) -> None:
    """Raise UserError with what changed, where the checkpoints at `place` are those of another training."""
    changed = [
        f"the data were {before.get(key)!s:.12} and are {now.get(key)!s:.12}"
        if key == "data"
        else f"{section}.{key} was {before.get(key)} and is {now.get(key)}"
        for key in sorted({*before, *now})
        if key not in LENGTH and before.get(key) != now.get(key)
    ]
    if changed:
        raise UserError(
            f"{place} holds the checkpoints of another training: {'; '.join(changed)}; put that back, or remove the "
            "folder to train anew"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
