"""``params.yaml`` as one typed object, checked as a whole before anything runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, create_model
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from components.io.errors import UserError
from components.io.runtime import Runtime
from pipelines.contradictions import contradictions
from pipelines.messages import problems
from pipelines.stages import STAGES

PARAMS_FILE = Path("params.yaml")


class Params(BaseModel, frozen=True, extra="forbid"):
    """All parameters: one section for each stage, by its name, and `runtime`."""

    runtime: Runtime = Field(default=Runtime(), description="where and how wide to run; changes no result")


@cache
def params_model() -> type[Params]:
    """`Params` with a section for every stage, of the class that the stage's own module defines."""
    sections: dict[str, Any] = {
        stage.name: (stage.params_class(), Field(description=f"the parameters of {stage.name}"))
        for stage in STAGES.values()
    }
    with warnings.catch_warnings():
        # a section must be called as its stage is, and BaseModel still has an old method `validate`, which goes unused
        warnings.filterwarnings("ignore", 'Field name "validate"', UserWarning)
        return create_model("Params", __base__=Params, **sections)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file.

    Raises UserError, with the line, when the file is missing, is no YAML, or names a key twice.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: write one with `vlp recipe demo`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): it must be a text file in UTF-8") from None


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping in a YAML 1.2 text; `name` says in messages where the text is from."""
    try:
        content = YAML(typ="safe", pure=True).load(text)
    except DuplicateKeyError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        key = str(error.problem).partition('"')[2].partition('"')[0]
        raise UserError(f"{name}{line}: key {key} stands twice in its section: remove one") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: this is not YAML ({error.problem or error.context})") from None
    except YAMLError as error:
        raise UserError(f"{name}: this is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise UserError(f"{name}: a mapping of stages to their parameters is wanted, this is not one")
    return content


def override(content: dict[str, Any], assignment: str) -> None:
    """Set one value of the mapping in place: ``clean.max_words=20``; the value is read as YAML.

    Raises UserError when `assignment` has no ``=`` or leads through something that is no mapping.
    """
    key, equals, text = assignment.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise UserError(f"--set {assignment}: write it as section.key=value")
    node = content
    for step in path[:-1]:
        node = node.setdefault(step, {})
        if not isinstance(node, dict):
            raise UserError(f"--set {assignment}: {step} is a value, not a section")
    try:
        node[path[-1]] = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        raise UserError(f"--set {assignment}: {text} is not a YAML value") from None


def check_params(content: dict[str, Any], name: str) -> Params:
    """The typed parameters of a mapping; `name` says in messages where it is from.

    Raises UserError that lists every problem, one a line: the key, the value, what is allowed, the nearest valid name.
    """
    model = params_model()
    try:
        # strictly, so that true is no 1.0 and "64" no 64; as JSON, where a list may be a tuple and a text a path
        params = model.model_validate_json(json.dumps(content, default=str), strict=True)
        found = contradictions(params)
    except ValidationError as error:
        found = problems(error, model)
    if not found:
        return params
    if len(found) == 1:
        raise UserError(f"{name}: {found[0]}")
    raise UserError("\n  ".join([f"{name}: {len(found)} problems", *found]))


def load_params(path: Path = PARAMS_FILE, overrides: Sequence[str] = ()) -> Params:
    """Read and check a parameter file, after setting `overrides` (``section.key=value``) in it.

    The result has an attribute for each stage, an instance of the class that the stage's module defines.
    Raises UserError as `read_yaml`, `override` and `check_params` do.
    """
    content = read_yaml(path)
    for assignment in overrides:
        override(content, assignment)
    return check_params(content, str(path))
