"""Stage `validate`: the gate between data and training. Great Expectations over every stage's records and outcomes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, model_validator

from components.io.errors import UserError
from components.io.runtime import Runtime

if TYPE_CHECKING:
    import pandas as pd

    from components.data.validation.suites import Suite

RESULTS_FILE = "results.json"
STATISTICS_FILE = "statistics.json"
DOCS_FOLDER = "docs"
SENTENCES = 5  # failed expectations that the error message spells out; the documentation has all


class RejectShares(BaseModel, frozen=True, extra="forbid"):
    """The largest share of its rows that a stage may reject."""

    download: float = Field(default=0.8, ge=0, le=1, description="of each source; years-old web lists lose half")
    clean: float = Field(default=0.3, ge=0, le=1)
    deduplicate: float = Field(default=0.5, ge=0, le=1)
    shard: float = Field(default=0.0, ge=0, le=1)
    prepare_tasks: float = Field(default=0.0, ge=0, le=1, description="of each split of each task")


class ValidateParams(BaseModel, frozen=True, extra="forbid"):
    """What the data must be for training to start."""

    max_reject_share: RejectShares = RejectShares()
    max_duplicate_share: float = Field(default=0.5, ge=0, le=1, description="of the rows that `deduplicate` sees")
    evaluation_splits: tuple[str, ...] = Field(
        default=("val", "test"), description="splits of every task that no unique picture and no `train` may share"
    )
    distinct: bool = Field(default=True, description="unique pictures must differ in their bytes")
    min_pictures: int = Field(default=1, ge=1, description="unique pictures")
    min_words: int = Field(default=1, ge=1, le=1000, description="words of every cleaned caption, at least")
    max_words: int = Field(default=30, ge=1, le=1000, description="words of every cleaned caption, at most")
    min_side: int = Field(default=1, ge=1, le=65_535, description="pixels of a cleaned picture's short side, at least")
    max_side: int = Field(default=16_384, ge=1, le=65_535, description="pixels of its long side, at most")
    max_aspect: float = Field(default=1000.0, ge=1, le=1000.0, description="its long side over its short side, at most")
    max_bytes: int = Field(default=100_000_000, ge=1, description="bytes of a picture's file, at most")
    baseline: Path | None = Field(
        default=None, description="statistics.json of an earlier run, put aside, that captions and sizes must resemble"
    )
    max_words_drift: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="share of a source's captions that may differ in length from the baseline's",
    )
    max_size_drift: float = Field(
        default=0.1, ge=0, le=1, description="share of a source's pictures that may differ in size from the baseline's"
    )
    examples: int = Field(default=5, ge=0, le=100, description="offending records that results and docs show for each")

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for low, high in (("min_words", "max_words"), ("min_side", "max_side")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"`{low}` is {getattr(self, low)}, above `{high}`, {getattr(self, high)}")
        return self


def validate(
    params: ValidateParams,
    *,
    raw: Path,
    clean: Path,
    unique: Path,
    shards: Path,
    tasks: Path,
    validation: Path,
    runtime: Runtime = Runtime(),
) -> None:
    """Check every stage's records and outcomes, and write results, statistics and Data Docs.

    ``results.json`` lists each expectation with its threshold and what was observed; ``offenders.parquet`` every line
    that breaks one; ``statistics.json`` describes the pictures and captions of each stage by source;
    ``docs/index.html`` is the data documentation. Nothing in them depends on the clock or on where the data lie.

    Raises UserError, after all is written, when an expectation failed; and when a stage has not finished.
    """
    from components.data.validation.expect import run_suites
    from components.io.documents import write_json
    from components.io.work import discard, publish, stage_work

    inputs = {"raw": raw, "clean": clean, "unique": unique, "shards": shards, "tasks": tasks}
    if params.baseline is not None:
        if not params.baseline.is_file():
            raise UserError(
                f"validate.baseline is {params.baseline}, where no file is: put a run's statistics.json there"
            )
        inputs["baseline"] = params.baseline
    work = stage_work(runtime, "validate", params, inputs)
    built = work / "built"
    shutil.rmtree(built, ignore_errors=True)
    built.mkdir()
    suites, statistics = gather(params, raw=raw, clean=clean, unique=unique, shards=shards, tasks=tasks)
    results = run_suites(suites, built / DOCS_FOLDER, params.examples, statistics)
    write_json(built / STATISTICS_FILE, statistics)
    write_json(built / RESULTS_FILE, results)
    publish(built, validation)
    discard(work)

    sentences = [
        f"{suite['suite']}: {item['sentence']}"
        for suite in results["suites"]
        for item in suite["expectations"]
        if not item["success"]
    ]
    if sentences:
        count = f"{len(sentences)} expectation{'s' * (len(sentences) > 1)} of the data failed"
        more = f"; and {len(sentences) - SENTENCES} more" if len(sentences) > SENTENCES else ""
        raise UserError(
            f"{count}: {'; '.join(sentences[:SENTENCES])}{more}; see {validation / DOCS_FOLDER / 'index.html'}, then "
            "mend the data or change the threshold in the section `validate` of params.yaml"
        )


def gather(
    params: ValidateParams, *, raw: Path, clean: Path, unique: Path, shards: Path, tasks: Path
) -> tuple[list[Suite], dict[str, Any]]:
    """The suites with the data frames to run them on, and the statistics by stage and source."""
    from components.data.clean import source_folders
    from components.data.validation.frames import (
        count_outcomes,
        describe,
        drift_frame,
        funnel_frame,
        read_pictures,
        row_problems,
        schema_problems,
    )
    from components.data.validation.suites import drift_suite, file_suite, picture_suite, row_suite, schema_suite
    from components.io.progress import progress
    from components.io.records import read_manifest

    allowed = params.max_reject_share
    suites: list[Suite] = []
    statistics: dict[str, Any] = {}
    sources = source_folders(raw)
    task_folders = sorted(path for path in tasks.glob("*") if path.is_dir() and not path.name.startswith("."))
    with progress("read records", total=4 + len(task_folders), unit="stages") as advance:
        pictures = read_pictures(sources)
        statistics["raw"] = describe(pictures)
        suites.append(picture_suite("raw", pictures.frame, params, decoded=False))
        parts = {folder.name: (count_outcomes(folder)["all"], read_manifest(folder).captions) for folder in sources}
        problems = {folder.name: row_problems(folder)["all"] for folder in sources}
        suites.append(row_suite("raw-rows", funnel_frame(parts, None, problems), allowed.download, None))
        kept = sum(_kept(counts) for counts, _ in parts.values())
        advance()

        tasks_seen = [_Task(folder, params.evaluation_splits) for folder in task_folders]
        evaluation = {sha256 for task in tasks_seen for sha256 in task.evaluation}
        protected = _protected_names(unique)
        handed_on: int | None = None
        for name, folder, share in (
            ("clean", clean, allowed.clean),
            ("unique", unique, allowed.deduplicate),
            ("shards", shards, allowed.shard),
        ):
            pictures = read_pictures([folder], protected if name != "clean" else frozenset())
            frame = pictures.frame
            statistics[name] = describe(pictures)
            if name != "clean":
                frame = frame.assign(leak=frame["sha256"].isin(evaluation).astype("int64"))
            suites.append(
                picture_suite(
                    name,
                    frame,
                    params,
                    distinct=params.distinct and name != "clean",
                    rows=handed_on if name == "shards" else None,
                    least=params.min_pictures if name == "unique" else 0,
                )
            )
            counts = count_outcomes(folder).get("all", Counter())
            duplicates = params.max_duplicate_share if name == "unique" else None
            parts = {"all": (counts, read_manifest(folder).captions)}
            suites.append(row_suite(f"{name}-rows", funnel_frame(parts, kept, row_problems(folder)), share, duplicates))
            kept, handed_on = _kept(counts), len(frame)
            advance()
        suites.append(file_suite("shards-files", _problems(shards)))
        folders = [(f"raw/{folder.name}", folder) for folder in sources]
        folders += [("clean", clean), ("unique", unique), ("shards", shards)]
        folders += [(f"tasks/{task.name}/{split}", task.folder / split) for task in tasks_seen for split in task.splits]
        suites.append(schema_suite("schemas", schema_problems(folders)))

        for task in tasks_seen:
            statistics[f"tasks/{task.name}"] = {split: describe(task.splits[split]) for split in task.splits}
            suites.append(picture_suite(f"task-{task.name}", task.frame(), params))
            suites.append(row_suite(f"task-{task.name}-rows", task.funnel(), allowed.prepare_tasks, None))
            advance()
    if params.baseline is not None:
        drifted = drift_frame(statistics, _read_baseline(params.baseline), ("clean", "unique"))
        suites.append(drift_suite("drift", drifted, params.max_words_drift, params.max_size_drift))
    return suites, statistics


def _protected_names(unique: Path) -> frozenset[str]:
    """The names that `deduplicate` kept out."""
    import pyarrow.parquet as pq

    from components.data.duplicates.protected import PROTECTED_FILE

    path = unique / PROTECTED_FILE
    return frozenset(pq.read_table(path, columns=["name"])["name"].to_pylist()) if path.is_file() else frozenset()


def _read_baseline(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # what `drift_frame` reads, touched once here
        for stage in ("clean", "unique"):
            for its in content.get(stage, {}).values():
                [float(count) for of in ("words_per_caption", "short_side") for count in its[of]["histogram"]]
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise UserError(
            f"validate.baseline, {path}, is no statistics.json of `validate` ({type(error).__name__}: {error}): put "
            "there one of a run that you trust"
        ) from None
    baseline: dict[str, Any] = content
    return baseline


class _Task:
    """The splits of one task."""

    def __init__(self, folder: Path, evaluation_splits: tuple[str, ...]) -> None:
        from components.data.validation.frames import read_pictures
        from components.io.records import MANIFEST_FILE

        self.folder, self.name = folder, folder.name
        found = [path.parent for path in folder.glob(f"*/{MANIFEST_FILE}")]
        order = {"train": 0, "val": 1, "test": 2}
        found.sort(key=lambda path: (order.get(path.name, len(order)), path.name))
        self.splits = {path.name: read_pictures([path]) for path in found}
        self.evaluation = {
            sha256
            for split, pictures in self.splits.items()
            if split in evaluation_splits
            for sha256 in pictures.frame["sha256"]
        }

    def frame(self) -> pd.DataFrame:
        """Pictures of all splits; `leak` is 1 for a training picture that is in an evaluation split too."""
        import pandas as pd

        frames = []
        for split, pictures in self.splits.items():
            leak = pictures.frame["sha256"].isin(self.evaluation) if split == "train" else False
            frames.append(pictures.frame.assign(split=split, leak=leak).astype({"leak": "int64"}))
        return pd.concat(frames, ignore_index=True)

    def funnel(self) -> pd.DataFrame:
        from components.data.validation.frames import count_outcomes, funnel_frame, row_problems

        counts = count_outcomes(self.folder, by="split")
        captions = {split: int(pictures.frame["captions"].sum()) for split, pictures in self.splits.items()}
        parts = {
            split: (counts.get(split, Counter()), captions.get(split, 0)) for split in sorted({*counts, *captions})
        }
        return funnel_frame(parts, None, row_problems(self.folder, by="split"))


def _problems(shards: Path) -> pd.DataFrame:
    import pandas as pd

    from components.io.shards import verify

    return pd.DataFrame({"problem": pd.Series(verify(shards), dtype="str")})


def _kept(counts: Counter[tuple[str, str]]) -> int:
    return sum(count for (status, _), count in counts.items() if status == "kept")
