"""Why a training step has left the finite numbers, in words."""

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor, nn


def raise_not_finite(model: nn.Module, images: Tensor, features: Mapping[str, Tensor]) -> NoReturn:
    """Raise FloatingPointError for ITC similarities that are not finite, naming the first cause that is found.

    Pictures (B, 3, S, S) come first, then the model's parameters and buffers, then the encoders' features (B, E).
    """
    cause = (
        _rows("the input pictures", images)
        or _tensors(model)
        or next((found for name, value in features.items() if (found := _rows(name, value))), None)
        or "their dot products over the temperature overflow"
    )
    raise FloatingPointError(f"ITC similarities are not finite: {cause}")


def _rows(name: str, tensor: Tensor) -> str | None:
    bad = (~tensor.isfinite().flatten(1).all(dim=1)).nonzero().flatten().tolist()
    return f"{name} in rows {bad} of the batch are not finite" if bad else None


def _tensors(model: nn.Module) -> str | None:
    bad = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if not bad:
        return None
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the weights {bad[0]}{more} are not finite; a lower learning rate or gradient clipping may help"
