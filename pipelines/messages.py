"""What pydantic found wrong with ``params.yaml``, said in the words of the file: key, value, what is allowed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

Schema = dict[str, Any]

_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "greater than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
    "minLength": "of at least {} characters",
    "maxLength": "of at most {} characters",
    "minItems": "with at least {} entries",
    "maxItems": "with at most {} entries",
    "minProperties": "with at least {} entries",
    "pattern": "that matches {}",
    "multipleOf": "that is a multiple of {}",
}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "a mapping",
}


def nearest(name: str, names: Sequence[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be, if any is near."""
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return found[0] if found else None


def suggestion(name: str, names: Sequence[str], what: str = "allowed") -> str:
    """A clause for a message about the unknown `name`: the nearest of `names`, and all of them."""
    near = nearest(name, names)
    meant = f"did you mean {near}? " if near else ""
    return f"{meant}{what}: {', '.join(names) or 'nothing'}"


def show(value: Any, limit: int = 60) -> str:
    """A value as it could stand in the file, cut to `limit` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def problems(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each thing that is wrong, in the order of the file's sections, without repetitions."""
    schema = model.model_json_schema()
    lines = [_line(dict(found), schema) for found in error.errors(include_url=False)]
    return list(dict.fromkeys(lines))


def _line(found: dict[str, Any], schema: Schema) -> str:
    kind, value, location = found["type"], found["input"], found["loc"]
    path, leaf, parent = _walk(location, schema)
    key = ".".join(path) or "the file"
    if kind == "extra_forbidden":
        return f"{key}: no such key; {suggestion(path[-1], list(parent.get('properties', ())))}"
    if kind == "missing":
        return f"{key}: missing; it must be {allowed(leaf, schema)}"
    if kind == "union_tag_invalid":  # of objects told apart by their key `kind`
        tags = [tag.strip("' ") for tag in found["ctx"]["expected_tags"].split(",")]
        return f"{key}.kind: {show(found['ctx']['tag'])} is not allowed; {suggestion(found['ctx']['tag'], tags)}"
    if kind in ("value_error", "assertion_error"):
        message = str(found["ctx"]["error"])
        return message if message.startswith(key) or not path else f"{key}: {message}"
    what = "this name" if location[-1:] == ("[key]",) else show(value)
    text = f"{key}: {what} is not allowed; it must be {allowed(leaf, schema)}"
    choices = [str(choice) for choice in _choices(leaf, schema)]
    near = nearest(value, choices) if isinstance(value, str) and len(choices) > 1 else None
    return f"{text}; did you mean {near}?" if near else text


def _walk(location: Sequence[int | str], schema: Schema) -> tuple[list[str], Schema, Schema]:
    """Follow an error's location through the schema: the key's path as in the file, its schema, its parent's."""
    path: list[str] = []
    leaf, parent, parent_leaf = schema, schema, schema
    for step in location:
        if step == "[key]":
            leaf = _key_rule(parent_leaf, schema)
            continue
        tagged = _tagged(step, leaf, schema)
        if tagged is not None:
            leaf = tagged
            continue
        following = _step(leaf, step, schema)
        if following is None and _is_branch(step, leaf, schema):
            continue  # pydantic names the branch of a union in the location; the file does not
        path.append(str(step))
        parent_leaf = leaf
        parent = _object(leaf, schema)
        leaf = following if following is not None else {}
    return path, leaf, parent


def _branches(leaf: Schema, schema: Schema) -> Iterator[Schema]:
    """The schema itself, references followed and unions unfolded."""
    if "$ref" in leaf:
        name = leaf["$ref"].removeprefix("#/$defs/")
        yield from _branches(schema["$defs"][name], schema)
        return
    options = [*leaf.get("anyOf", ()), *leaf.get("oneOf", ()), *leaf.get("allOf", ())]
    if not options:
        yield leaf
    for option in options:
        yield from _branches(option, schema)


def _object(leaf: Schema, schema: Schema) -> Schema:
    """The object schema that a key is looked up in; of a union's several, all their keys."""
    properties: dict[str, Any] = {}
    for branch in _branches(leaf, schema):
        properties.update(branch.get("properties", {}))
    return {"properties": properties}


def _step(leaf: Schema, step: int | str, schema: Schema) -> Schema | None:
    for branch in _branches(leaf, schema):
        if isinstance(step, int):
            if "prefixItems" in branch and step < len(branch["prefixItems"]):
                return dict(branch["prefixItems"][step])
            if "items" in branch:
                return dict(branch["items"])
        elif step in branch.get("properties", {}):
            return dict(branch["properties"][step])
        else:
            for values in (branch.get("additionalProperties"), *branch.get("patternProperties", {}).values()):
                if isinstance(values, dict):
                    return dict(values)
    return None


def _key_rule(leaf: Schema, schema: Schema) -> Schema:
    """What a free name of a mapping must be."""
    for branch in _branches(leaf, schema):
        if "propertyNames" in branch or "patternProperties" in branch:
            patterns = [{"pattern": pattern} for pattern in branch.get("patternProperties", {})]
            return {"type": "string", **branch.get("propertyNames", {}), **(patterns[0] if patterns else {})}
    return {}


def _tagged(step: int | str, leaf: Schema, schema: Schema) -> Schema | None:
    """The branch of a union of objects whose key `kind` is always `step`: pydantic names it so in a location."""
    if "oneOf" not in leaf:
        return None
    for branch in _branches(leaf, schema):
        if branch.get("properties", {}).get("kind", {}).get("const") == step:
            return branch
    return None


def _is_branch(step: int | str, leaf: Schema, schema: Schema) -> bool:
    """Whether pydantic means a union's branch (its type, its class or its discriminating value) by `step`."""
    if not {"anyOf", "oneOf"} & set(leaf):
        return False
    names = set(leaf.get("discriminator", {}).get("mapping", ()))
    for option in [*leaf.get("anyOf", ()), *leaf.get("oneOf", ())]:
        names.add(option.get("$ref", "").rpartition("/")[2])
    plain = {"int", "float", "str", "bool", "none", "path", "list", "dict", "tuple", "constrained-int"}
    return str(step) in names | plain or "[" in str(step)


def _choices(leaf: Schema, schema: Schema) -> list[Any]:
    return [
        choice
        for branch in _branches(leaf, schema)
        for choice in branch.get("enum", [branch["const"]] if "const" in branch else [])
    ]


def allowed(leaf: Schema, schema: Schema) -> str:
    """What a key takes, in words: choices, or type and range, with its description in brackets."""
    texts = []
    for branch in _branches(leaf, schema):
        choices = branch.get("enum", [branch["const"]] if "const" in branch else None)
        if choices is not None:
            texts.append(("one of " if len(choices) > 1 else "") + ", ".join(map(str, choices)))
            continue
        text = _TYPES.get(branch.get("type", ""), "something else")
        bounds = [words.format(branch[bound]) for bound, words in _BOUNDS.items() if bound in branch]
        if isinstance(branch.get("items"), dict) and branch["items"]:
            text += f" of items that are each {allowed(branch['items'], schema)}"
        texts.append(" ".join([text, " and ".join(bounds)]).strip())
    description = leaf.get("description")
    return " or ".join(dict.fromkeys(texts)) + (f" ({description})" if description else "")
