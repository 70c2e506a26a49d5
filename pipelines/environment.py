"""Settings of ``runtime`` from the environment: where a machine or cluster differs from ``params.yaml``.

``VLP_RUNTIME_RAY_ADDRESS=auto`` is ``runtime.ray_address: auto``. Only ``runtime``, which changes no result, may be set
so: DVC does not see the environment.
"""

from __future__ import annotations

import os
from typing import Any

from components.io.errors import UserError
from components.io.runtime import Runtime
from pipelines.messages import suggestion
from pipelines.params import override

PREFIX = "VLP_RUNTIME_"


def apply_environment(content: dict[str, Any]) -> None:
    """Set in a parameter file's content what the environment says of `runtime`. Raises UserError for unknown names."""
    for variable, value in sorted(os.environ.items()):
        if variable.startswith(PREFIX):
            key = variable.removeprefix(PREFIX).lower()
            if key not in Runtime.model_fields:
                raise UserError(f"{variable}: {suggestion(key, list(Runtime.model_fields), 'settings of runtime')}")
            override(content, f"runtime.{key}={value}")
