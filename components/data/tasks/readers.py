"""The published layouts of each task's annotations, told apart by their content; every entry becomes an item."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.data.tasks.answers import VISUAL_GENOME_WEIGHT, normalise_answer, weigh_answers
from components.data.tasks.items import PICKLES, Item, load_json, load_plain_pickle, refused
from components.io.errors import UserError
from components.io.outcomes import Reason

if TYPE_CHECKING:
    from components.data.prepare_tasks import TaskParams

Entry = dict[str, Any]
PICTURES = {"vqa": 1, "entailment": 1, "nlvr2": 2, "grounding": 1}
LABELS = {"contradiction": 0, "neutral": 1, "entailment": 2}  # as the published code numbers them


def read_items(params: TaskParams, base: Path, file: Path) -> Iterator[Item]:
    """The items of one annotation file of a task, in order; `base` is the folder that other files are named within.

    Raises UserError when the file is missing, or of no layout of the task's kind.
    """
    reader = {"vqa": _vqa, "entailment": _entailment, "nlvr2": _nlvr2, "grounding": _grounding}[params.kind]
    return reader(params, base, file)


def _by_split(
    file: Path, content: Any, pictures: int, read: Callable[[str, str | None, Entry], Item]
) -> Iterator[Item]:
    """Items of a list, or of ``{"train": [...], "val": [...], "test": [...]}``."""
    parts = (
        [(None, content)]
        if isinstance(content, list)
        else [(key, content[key]) for key in content if _is_list(content[key])]
    )
    for split, entries in parts:
        for index, entry in enumerate(entries):
            location = f"{file.name}:{'' if split is None else split}[{index}]"
            own = split
            if isinstance(entry, dict) and split is None and isinstance(entry.get("split"), str):
                own = entry["split"]
            if not isinstance(entry, dict):
                yield refused(location, own, pictures, "not an object")
            else:
                yield read(location, own, entry)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _wrong_layout(file: Path, kind: str, wanted: str) -> UserError:
    return UserError(f"{file} has no layout of the task kind {kind}: {wanted}")


# -- visual question answering


def _vqa(params: TaskParams, base: Path, file: Path) -> Iterator[Item]:
    content = load_json(file)
    if isinstance(content, dict) and isinstance(content.get("questions"), list):
        return _vqa_v2(params, base, file, content)
    if isinstance(content, list) and any(isinstance(entry, dict) and "qas" in entry for entry in content[:10]):
        return _visual_genome(params, file, content)
    if isinstance(content, list | dict):
        return _by_split(file, content, 1, _question)
    raise _wrong_layout(file, "vqa", "VQA v2 questions, Visual Genome QA, or a list of questions is wanted")


def _question(location: str, split: str | None, entry: Entry) -> Item:
    """ALBEF's and the built-in corpus's entries: `answer` is one answer or the answers of several people."""
    answer, image, question = entry.get("answer"), entry.get("image"), entry.get("question")
    if not isinstance(image, str) or not isinstance(question, str):
        return refused(location, split, 1, "no `image` and `question`")
    values: Entry = {"question_id": str(entry.get("question_id", entry.get("id", location)))}
    values["type"] = str(entry.get("type", ""))
    if isinstance(answer, list) and answer and all(isinstance(one, str) for one in answer):
        values["answers"], (values["targets"], values["weights"]) = answer, weigh_answers(answer)
    elif isinstance(answer, str):
        weight = VISUAL_GENOME_WEIGHT if entry.get("dataset") == "vg" else 1.0
        values |= {"answers": [answer], "targets": [normalise_answer(answer)], "weights": [weight]}
    elif answer is None:  # the published test questions
        values |= {"answers": [], "targets": [], "weights": []}
    else:
        return refused(location, split, 1, "`answer` is neither a text nor a list of texts")
    return Item(location, split, ((image,),), question, values)


def _vqa_v2(params: TaskParams, base: Path, file: Path, content: Entry) -> Iterator[Item]:
    answers: dict[Any, Entry] = {}
    for name in params.answers:
        found = load_json(base / name)
        if not isinstance(found, dict) or not isinstance(found.get("annotations"), list):
            raise _wrong_layout(base / name, "vqa", "`answers` names VQA v2 annotation files")
        answers |= {entry.get("question_id"): entry for entry in found["annotations"] if isinstance(entry, dict)}
    subtype = str(content.get("data_subtype", ""))
    template = params.image_name or "{subtype}/COCO_{subtype}_{image_id:012d}.jpg"
    for index, entry in enumerate(content["questions"]):
        location = f"{file.name}:questions[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("image_id"), int):
            yield refused(location, None, 1, "no `image_id`")
            continue
        name = template.format(subtype=subtype.removesuffix("-dev2015"), image_id=entry["image_id"])
        known = answers.get(entry.get("question_id"), {})
        people = [one.get("answer") for one in known.get("answers", ()) if isinstance(one, dict)]
        item = _question(
            location, None, entry | {"image": name, "answer": people or None, "type": known.get("answer_type", "")}
        )
        names = ((name, name.rpartition("/")[2]),)
        yield item if item.error else Item(location, None, names, item.text, item.values)


def _visual_genome(params: TaskParams, file: Path, content: list[Any]) -> Iterator[Item]:
    folders = ("", "VG_100K/", "VG_100K_2/", "image/")
    for index, entry in enumerate(content):
        questions = entry.get("qas") if isinstance(entry, dict) else None
        if not isinstance(questions, list):
            yield refused(f"{file.name}:[{index}]", None, 1, "no `qas`")
            continue
        for place, question in enumerate(questions):
            location = f"{file.name}:[{index}].qas[{place}]"
            if not isinstance(question, dict):
                yield refused(location, None, 1, "not an object")
                continue
            number = question.get("image_id", entry.get("image_id", entry.get("id")))
            name = (params.image_name or "{image_id}.jpg").format(image_id=number, subtype="")
            asked = question | {"image": name, "question_id": question.get("qa_id", location), "dataset": "vg"}
            item = _question(location, None, asked)
            names = (tuple(folder + name for folder in folders),)
            yield item if item.error else Item(location, None, names, item.text, item.values)


# -- visual entailment


def _entailment(params: TaskParams, base: Path, file: Path) -> Iterator[Item]:
    content = load_json(file)
    if not isinstance(content, list | dict):
        raise _wrong_layout(file, "entailment", "JSON or JSON by lines with image, hypothesis and label is wanted")
    return _by_split(file, content, 1, _hypothesis)


def _hypothesis(location: str, split: str | None, entry: Entry) -> Item:
    """SNLI-VE's own, the sample's and ALBEF's keys. A premise in words is never read: the picture is the premise."""
    image = entry.get("image", entry.get("Flickr30K_ID", entry.get("Flickr30kID")))
    text = entry.get("sentence", entry.get("hypothesis", entry.get("sentence2")))
    label = entry.get("label", entry.get("gold_label"))
    if isinstance(image, int):
        image = str(image)
    if not isinstance(image, str) or not isinstance(text, str):
        return refused(location, split, 1, "no picture and hypothesis")
    if label == "-":
        return refused(location, split, 1, "the annotators did not agree", Reason.UNLABELLED)
    if label not in LABELS:
        return refused(location, split, 1, f"the label {label!r} is none of {', '.join(LABELS)}")
    names = (image,) if "." in image else (f"{image}.jpg",)
    return Item(location, split, (names,), text, {"label": LABELS[label]})


# -- NLVR2


def _nlvr2(params: TaskParams, base: Path, file: Path) -> Iterator[Item]:
    content = load_json(file)
    if not isinstance(content, list | dict):
        raise _wrong_layout(file, "nlvr2", "JSON or JSON by lines with sentence and label is wanted")
    return _by_split(file, content, 2, _statement)


def _statement(location: str, split: str | None, entry: Entry) -> Item:
    """NLVR2's own lines, whose pictures are named by `identifier`, and ALBEF's and the corpus's with `images`."""
    text, label, images, identifier = (entry.get(key) for key in ("sentence", "label", "images", "identifier"))
    if not isinstance(text, str):
        return refused(location, split, 2, "no `sentence`")
    truth = {"true": 1, "false": 0}.get(str(label).lower())
    if truth is None:
        return refused(location, split, 2, f"the label {label!r} is neither True nor False")
    if isinstance(images, list) and len(images) == 2 and all(isinstance(name, str) for name in images):
        pictures: tuple[tuple[str, ...], ...] = ((images[0],), (images[1],))
    elif isinstance(identifier, str) and identifier.count("-") >= 3:
        stem, folder = identifier.rpartition("-")[0], str(entry.get("directory", ""))
        part = identifier.partition("-")[0]
        places = ("", f"{part}/", f"images/{part}/{folder}/", f"{part}/{folder}/")
        pictures = tuple(tuple(f"{place}{stem}-img{side}.png" for place in places) for side in (0, 1))
    else:
        return refused(location, split, 2, "neither two `images` nor an `identifier`")
    return Item(location, split, pictures, text, {"label": truth})


# -- grounding


def _grounding(params: TaskParams, base: Path, file: Path) -> Iterator[Item]:
    if file.suffix in PICKLES:
        return _refcoco(params, base, file, load_plain_pickle(file))
    content = load_json(file)
    if isinstance(content, dict) and isinstance(content.get("categories"), list):
        return _single_instances(file, content)
    if isinstance(content, list) and any(isinstance(entry, dict) and "sentences" in entry for entry in content[:10]):
        return _refcoco(params, base, file, content)
    if isinstance(content, list | dict):
        return _by_split(file, content, 1, _expression)
    raise _wrong_layout(file, "grounding", "refs(…).p, COCO instances, or a list of expressions is wanted")


def _box(value: Any) -> list[float] | None:
    """Left, top, width, height, or None for anything else."""
    if not isinstance(value, list | tuple) or len(value) < 4:
        return None
    box = [float(part) for part in value[:4] if isinstance(part, int | float)]
    return box if len(box) == 4 and box[2] > 0 and box[3] > 0 else None


def _boxes(values: Any) -> list[list[float]]:
    return [box for value in values or () if (box := _box(value)) is not None]


def _expression(location: str, split: str | None, entry: Entry) -> Item:
    image, text, box = entry.get("image"), entry.get("text"), _box(entry.get("box", entry.get("bbox")))
    if not isinstance(image, str) or not isinstance(text, str):
        return refused(location, split, 1, "no `image` and `text`")
    if box is None and ("box" in entry or "bbox" in entry):
        return refused(location, split, 1, "the box is not left, top, width, height")
    values = {
        "ref_id": str(entry.get("ref_id", entry.get("id", location))),
        "box": box,
        "candidates": _boxes(entry.get("candidates")),
        "subset": split or "",
    }
    return Item(location, split, ((image,),), text, values)


def _refcoco(params: TaskParams, base: Path, file: Path, refs: Any) -> Iterator[Item]:
    """RefCOCO, RefCOCO+ and RefCOCOg: each sentence of each reference is an item of the reference's split."""
    if not isinstance(refs, list) or params.instances is None:
        raise UserError(
            f"{file} holds references, whose boxes are in COCO's instances.json: set the task's `instances`"
        )
    coco = load_json(base / params.instances)
    if not isinstance(coco, dict) or not all(_is_list(coco.get(key)) for key in ("images", "annotations")):
        raise _wrong_layout(base / params.instances, "grounding", "`instances` names COCO's instances.json")
    files = {entry.get("id"): entry.get("file_name") for entry in coco["images"]}
    boxes = {entry.get("id"): entry.get("bbox") for entry in coco["annotations"]}
    proposed = _proposals(params, base, coco["annotations"])
    for index, ref in enumerate(refs):
        location = f"{file.name}:[{index}]"
        if not isinstance(ref, dict) or not isinstance(ref.get("sentences"), list):
            yield refused(location, None, 1, "no `sentences`")
            continue
        split, picture = str(ref.get("split")), ref.get("image_id")
        name, box = files.get(picture), _box(boxes.get(ref.get("ann_id")))
        for place, sentence in enumerate(ref["sentences"]):
            where = f"{location}.sentences[{place}]"
            said = sentence if isinstance(sentence, dict) else {}
            text = said.get("raw", said.get("sent"))
            if not isinstance(name, str) or box is None or not isinstance(text, str):
                yield refused(where, split, 1, "the picture, the box or the sentence is missing")
                continue
            values = {"ref_id": str(ref.get("ref_id")), "box": box, "candidates": proposed[picture], "subset": split}
            yield Item(where, split, (_coco_names(name),), text, values)


def _coco_names(name: str) -> tuple[str, ...]:
    """Where COCO's ``COCO_train2014_000000000001.jpg`` may lie."""
    parts = name.split("_")
    return (name, f"{parts[1]}/{name}") if len(parts) == 3 else (name,)


def _proposals(params: TaskParams, base: Path, annotations: list[Any]) -> dict[Any, list[list[float]]]:
    """Boxes to choose from by picture: a detector's ``{"ID": [[left, top, width, height], ...]}``, or all true ones."""
    found: dict[Any, list[list[float]]] = defaultdict(list)
    if params.proposals is None:
        for entry in annotations:
            found[entry.get("image_id")] += _boxes([entry.get("bbox")])
        return found
    content = load_json(base / params.proposals)
    if not isinstance(content, dict):
        raise _wrong_layout(base / params.proposals, "grounding", "`proposals` maps picture ids to lists of boxes")
    for key, boxes in content.items():
        found[int(key) if key.isdecimal() else key] = _boxes(boxes)
    return found


def _single_instances(file: Path, coco: Entry) -> Iterator[Item]:
    """COCO's instances as a small grounding test: the category names the one thing of its kind in a picture."""
    names = {entry["id"]: entry["name"] for entry in coco["categories"]}
    by_picture: dict[Any, list[Entry]] = defaultdict(list)
    for entry in coco.get("annotations", ()):
        if not entry.get("iscrowd"):
            by_picture[entry.get("image_id")].append(entry)
    for picture in coco.get("images", ()):
        things = by_picture[picture.get("id")]
        counts = Counter(entry["category_id"] for entry in things)
        for entry in things:
            box = _box(entry.get("bbox"))
            if counts[entry["category_id"]] == 1 and box is not None:
                values = {"ref_id": str(entry["id"]), "box": box, "subset": ""}
                values["candidates"] = _boxes([thing.get("bbox") for thing in things])
                location = f"{file.name}:annotation {entry['id']}"
                yield Item(
                    location, None, (_coco_names(str(picture["file_name"])),), names[entry["category_id"]], values
                )
