"""Settings of ``runtime`` from the environment: where a machine or cluster differs from ``params.yaml``.

``VLP_RUNTIME_RAY_ADDRESS=auto`` is ``runtime.ray_address: auto``. Only ``runtime``, which changes no result, may be set
so: DVC does not see the environment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from components.io.runtime import Runtime
from pipelines.messages import suggestion
from pipelines.params import Params, check_params, override, read_yaml

PREFIX = "VLP_RUNTIME_"


def apply_environment(content: dict[str, Any]) -> None:
    """Set in a parameter file's content what the environment says of `runtime`. Raises UserError for unknown names."""
    for variable, value in sorted(os.environ.items()):
        if variable.startswith(PREFIX):
            key = variable.removeprefix(PREFIX).lower()
            if key not in Runtime.model_fields:
                raise UserError(f"{variable}: {suggestion(key, list(Runtime.model_fields), 'settings of runtime')}")
            override(content, f"runtime.{key}={value}")


def read_params(path: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Params]:
    """A parameter file as this machine runs it: with the environment's `runtime`, then with `overrides`; checked.

    Its content comes with it, for ``dvc.yaml``. Raises UserError as `load_params` does, and for unknown variables.
    """
    content = read_yaml(path)
    apply_environment(content)
    for assignment in overrides:
        override(content, assignment)
    return content, check_params(content, str(path))
