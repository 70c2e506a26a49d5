"""The stages by name. A stage's module, function and parameter class follow from its name and its room by rule.

Stage ``clean`` of room ``data`` is function ``clean`` of ``components/data/clean.py`` with parameters ``CleanParams``.
Nothing of a stage is imported until it is asked for.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOMS: dict[str, tuple[str, ...]] = {
    "data": ("synthesize", "download", "prepare_tasks", "clean", "deduplicate", "shard", "validate"),
    "training": ("pretrain", "features", "finetune"),
    "evaluation": ("evaluate", "report"),
}


@dataclass(frozen=True)
class Stage:
    """One stage: its name and its room under ``components``."""

    name: str
    room: str

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return f"components.{self.room}.{self.name}"

    @property
    def params_name(self) -> str:
        """The name of the class of the stage's parameters."""
        return "".join(word.capitalize() for word in self.name.split("_")) + "Params"

    def params_class(self) -> type[BaseModel]:
        """The class of the stage's section of ``params.yaml``."""
        found: type[BaseModel] = getattr(import_module(self.module), self.params_name)
        return found

    def function(self) -> Callable[..., None]:
        """``stage(params, *, path=..., runtime=...)``."""
        found: Callable[..., None] = getattr(import_module(self.module), self.name)
        return found

    def options(self) -> dict[str, type[Path] | type[str]]:
        """The function's keyword-only parameters but for `runtime`, which the command line offers: name to type."""
        function = self.function()
        hints = typing.get_type_hints(function)
        return {
            name: Path if hints[name] is Path else str
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name != "runtime"
        }

    def run(self, params: Any, **options: Any) -> None:
        """Run the stage with the sections of `params` (see ``pipelines.params``) that are its own."""
        self.function()(getattr(params, self.name), **options, runtime=params.runtime)


STAGES: dict[str, Stage] = {name: Stage(name, room) for room, names in ROOMS.items() for name in names}
