"""Running the suites through Great Expectations, and what came of it as plain, reproducible JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Great Expectations reads it when it is imported; the command line sets it too, but a stage can be called without.
os.environ["GX_ANALYTICS_ENABLED"] = "false"

import great_expectations as gx
import pyarrow as pa
import pyarrow.parquet as pq
from great_expectations.core.run_identifier import RunIdentifier

from components.data.validation.docs import settle
from components.data.validation.suites import Suite

RUN = RunIdentifier(run_name="vlp", run_time=datetime(2000, 1, 1, tzinfo=UTC))  # the clock must not enter the out
SITE = "vlp"
OFFENDERS_FILE = "offenders.parquet"


OFFENDERS_SCHEMA = pa.schema(
    [
        ("suite", pa.string()),
        ("description", pa.string()),  # of the expectation
        ("column", pa.string()),  # null where two columns, or whole lines, are judged
        ("line", pa.string()),  # the picture, the part of the rows, or the problem
        ("value", pa.string()),
    ]
)


def run_suites(
    suites: Sequence[Suite], docs: Path, examples: int, statistics: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run every suite on its frame, write Data Docs to the folder `docs`, and return the results.

    Of each expectation at most `examples` offending lines are named in results and docs, however many there are; all
    of them stand in ``offenders.parquet`` beside `docs`. `statistics` by source go into the docs' first page.
    """
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    for site in context.get_site_names():
        context.delete_data_docs_site(site)  # the default one, in a folder for temporary files
    context.add_data_docs_site(
        SITE,
        {
            "class_name": "SiteBuilder",
            "show_how_to_buttons": False,
            "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())},
            "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        },
    )
    source = context.data_sources.add_pandas(SITE)
    docs.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(docs.parent / OFFENDERS_FILE, OFFENDERS_SCHEMA, compression="zstd") as offenders:
        results = [_run(context, source, suite, examples, offenders) for suite in suites]
    context.build_data_docs(site_names=[SITE])
    settle(docs, results, statistics or {})
    return {"success": all(result["success"] for result in results), "suites": results}


def _run(context: Any, source: Any, suite: Suite, examples: int, offenders: pq.ParquetWriter) -> dict[str, Any]:
    batch = source.add_dataframe_asset(name=suite.name).add_batch_definition_whole_dataframe("all")
    stored = context.suites.add(gx.ExpectationSuite(name=suite.name, expectations=suite.expectations))
    definition = gx.ValidationDefinition(name=suite.name, data=batch, suite=stored)
    checkpoint = gx.Checkpoint(
        name=suite.name,
        validation_definitions=[context.validation_definitions.add(definition)],
        result_format={"result_format": "SUMMARY", "partial_unexpected_count": examples},
    )
    run = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": suite.frame}, run_id=RUN)
    (result,) = run.run_results.values()
    order = {expectation.description: place for place, expectation in enumerate(suite.expectations)}
    found = sorted(result.results, key=lambda item: order[item.expectation_config.description])
    failed = {item.expectation_config.description for item in found if not item.success}
    for expectation in suite.expectations:
        if expectation.description in failed:
            offenders.write_table(_offenders(batch, suite, expectation))
    return {
        "suite": suite.name,
        "success": bool(result.success),
        "lines": len(suite.frame),
        "expectations": [_summary(item, suite, examples) for item in found],
    }


def _offenders(batch: Any, suite: Suite, expectation: Any) -> pa.Table:
    """All lines that break an expectation: asked for again by themselves, since the docs would show every one."""
    frame = suite.frame
    columns = [getattr(expectation, name) for name in ("column", "column_A", "column_B") if hasattr(expectation, name)]
    if columns:
        found = batch.get_batch(batch_parameters={"dataframe": frame}).validate(
            expectation, result_format={"result_format": "COMPLETE"}
        )
        frame = frame.iloc[(found.result or {}).get("unexpected_index_list") or []]
    elif suite.label != "problem":  # how many lines there are is at fault, no line is
        frame = frame.iloc[:0]
    values = [frame[column].astype("str") for column in columns if column in frame]
    size = len(frame)
    return pa.table(
        [
            pa.repeat(suite.name, size),
            pa.repeat(expectation.description, size),
            pa.repeat(columns[0], size) if len(columns) == 1 else pa.nulls(size, pa.string()),
            pa.array(frame[suite.label].astype("str"), pa.string()),
            pa.array([" and ".join(line) for line in zip(*values, strict=True)], pa.string())
            if values
            else pa.nulls(size, pa.string()),
        ],
        schema=OFFENDERS_SCHEMA,
    )


def _summary(item: Any, suite: Suite, examples: int) -> dict[str, Any]:
    """One expectation's result. `observed` is a value, or for conditions on each line how many lines break it."""
    config, result = item.expectation_config, item.result or {}
    kwargs = {name: value for name, value in config.kwargs.items() if name not in ("batch_id", "column")}
    column = config.kwargs.get("column")
    if "unexpected_count" in result:
        observed: Any = {"lines": result["element_count"], "unexpected": result["unexpected_count"]}
    else:
        observed = _plain(result.get("observed_value"))
    positions = (result.get("partial_unexpected_index_list") or [])[:examples]
    columns = [column] if column else [kwargs[name] for name in ("column_A", "column_B") if name in kwargs]
    offenders = [
        {
            suite.label: str(suite.frame[suite.label].iloc[at]),
            **{name: _plain(suite.frame[name].iloc[at]) for name in columns},
        }
        for at in positions
    ]
    raised = _exception(item.exception_info)
    return {
        "expectation": config.type,
        "column": column,
        "threshold": {name: _plain(value) for name, value in sorted(kwargs.items())},
        "description": config.description,
        "success": bool(item.success),
        "observed": observed,
        "examples": offenders,
        "sentence": _sentence(
            config.type, config.description, bool(item.success), columns, observed, offenders, suite, raised
        ),
    }


def _sentence(
    kind: str,
    description: str,
    success: bool,
    columns: list[str],
    observed: Any,
    offenders: list[dict[str, Any]],
    suite: Suite,
    raised: str | None,
) -> str:
    where = f"{description[0].lower()}{description[1:]}"
    if success:
        return where
    if raised:
        return f"{where}: this could not be checked ({raised})"
    if not isinstance(observed, dict):
        first = f" ({suite.frame[suite.label].iloc[0]})" if suite.label == "problem" and len(suite.frame) else ""
        return f"{where}, but there are {observed}{first}" if "row_count" in kind else f"{where}, but it is {observed}"
    broken = f"{observed['unexpected']} of {observed['lines']} break it in {' and '.join(f'`{c}`' for c in columns)}"
    if not offenders:
        return f"{where}, but {broken}"
    values = " and ".join(str(offenders[0][column]) for column in columns)
    return f"{where}, but {broken} (such as {offenders[0][suite.label]}: {values})"


def _exception(info: Any) -> str | None:
    """The message of an exception that the library caught; it keeps one dictionary, or one for each metric."""
    if not info:
        return None
    for each in [info] if "raised_exception" in info else info.values():
        if each.get("raised_exception"):
            return str(each.get("exception_message")).splitlines()[0]
    return None


def _plain(value: Any) -> Any:
    """A value of numpy or pandas as JSON has it; what is not a number as null."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if value.is_integer() else round(value, 6)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
