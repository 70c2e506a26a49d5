"""VQA's submission file, and the checks that its server would make, before anything is uploaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from components.io.errors import UserError

SUBMISSION_FILE = "submission.json"
SHOWN = 3  # question ids named in a message


def write_submission(path: Path, question_ids: Sequence[str], answers: Sequence[str]) -> None:
    """Write ``[{"question_id": …, "answer": …}, …]``, the layout of VQA's server, checked by `problems`.

    Ids that are whole numbers are written as such. Raises UserError when two questions have the same id.
    """
    entries = [{"question_id": _id(one), "answer": said} for one, said in zip(question_ids, answers, strict=True)]
    if found := problems(entries, question_ids):
        raise UserError(f"no {SUBMISSION_FILE} can be written: {found[0]}; mend the task's annotations")
    path.write_text(json.dumps(entries, ensure_ascii=False) + "\n", encoding="utf-8")


def problems(entries: Any, question_ids: Iterable[str | int]) -> list[str]:
    """What the server would refuse, in sentences; empty when every question is answered once and none is unknown."""
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        return ["it is not a list of objects"]
    bad = [place for place, one in enumerate(entries) if not isinstance(one.get("answer"), str)]
    bad += [place for place, one in enumerate(entries) if not isinstance(one.get("question_id"), int | str)]
    if bad:
        return [f"entry {min(bad)} has no question_id with an answer that is a text"]
    given, wanted = Counter(str(one["question_id"]) for one in entries), Counter(str(one) for one in question_ids)
    found = [
        ("{} of the questions stand twice in the question list", [one for one, times in wanted.items() if times > 1]),
        ("{} questions are answered more than once", [one for one, times in given.items() if times > 1]),
        ("{} answered questions are not among the asked ones", [one for one in given if one not in wanted]),
        ("{} questions are not answered", [one for one in wanted if one not in given]),
    ]
    return [f"{text.format(f'{len(ids):,}')} ({_some(ids)})" for text, ids in found if ids]


def check_file(submission: Path, questions: Path) -> int:
    """Check a submission against the published question file (``v2_OpenEnded_…_questions.json``); returns its length.

    Raises UserError with everything that the server would refuse.
    """
    content = _load(questions)
    try:
        ids = [one["question_id"] for one in content["questions"]]
    except (KeyError, TypeError):
        raise UserError(f"{questions} is no question file of VQA: it has no `questions` with `question_id`") from None
    entries = _load(submission)
    if found := problems(entries, ids):
        raise UserError(f"{submission} must not be uploaded: {'; '.join(found)}")
    return len(entries)


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: name a file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no JSON ({error}): name another file") from None


def _id(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() else text


def _some(ids: Sequence[str]) -> str:
    return ", ".join([*ids[:SHOWN], "…"] if len(ids) > SHOWN else ids)
