"""Names by which public data sets know a picture: COCO's, Visual Genome's, Flickr's, NLVR2's, or its URL.

A name is text with its kind before a colon: ``coco:123456``, ``visual_genome:2317``, ``flickr:4385058960``,
``nlvr2:dev-850-0-img0``, ``url:host/path``. Two records of the same name are the same picture, whatever their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

Kind = Literal["coco", "visual_genome", "flickr"]
KINDS = ("coco", "visual_genome", "flickr", "nlvr2", "url")  # the surest first: it is the one to show

_PICTURE = r"\.(?:jpe?g|png|webp|bmp|gif|tiff?)$"
# COCO_train2014_000000123456.jpg, with the object's number in RefCOCO's lists: COCO_train2014_000000123456_7.jpg
_COCO_LONG = re.compile(r"coco_(?:train|val|test)20\d\d_(\d{12})(?:_\d+)?(?:$|\.)", re.IGNORECASE)
# 000000123456.jpg, train2017/000000123456.jpg: COCO's ids have six digits, so the other six are zeros
_COCO_SHORT = re.compile(rf"^(0{{5}}\d{{7}}){_PICTURE}", re.IGNORECASE)
_COCO_FOLDER = re.compile(rf"(?:train|val|test|unlabeled)20\d\d/0*(\d{{1,12}}){_PICTURE}", re.IGNORECASE)
_GENOME = re.compile(rf"(?:^|/)vg_100k(?:_2)?/0*(\d+){_PICTURE}", re.IGNORECASE)
# 2970773875_164f0c0b83_z.jpg, as Flickr serves it and Flickr8k names it
_FLICKR = re.compile(rf"^(\d{{4,12}})_[0-9a-f]{{8,12}}(?:_[a-z0-9]{{1,2}})?{_PICTURE}", re.IGNORECASE)
_FLICKR_PAGE = re.compile(r"^/photos/[^/]+/(\d{4,12})(?:/|$)")
_NUMBER = re.compile(rf"^0*(\d{{1,12}})(?:{_PICTURE}|$)", re.IGNORECASE)
_NLVR2_PAIR = re.compile(r"^((?:train|dev|test1|test2)-\d+-\d+)-\d+$")
_NLVR2 = re.compile(r"^((?:train|dev|test1|test2)-\d+-\d+-img[01])(?:$|\.)", re.IGNORECASE)


def names_of(text: str, hint: str = "") -> set[str]:
    """The names that a URL, a file name or a path within a data set stands for; `hint` is what else it is called.

    A bare number (``1000092795.jpg``, a local file) is a Flickr id where path or hint say so or it has eight digits or
    more, as Flickr30K and SNLI-VE name their files, and Visual Genome's where they say that.
    """
    web = text.lower().startswith(("http://", "https://"))
    found: set[str] = set()
    host, path = "", text.replace("\\", "/")
    if web:
        try:
            parts = urlsplit(text)
            host, path = (parts.hostname or "").lower().rstrip("."), unquote(parts.path)
        except ValueError:  # no URL that could have been fetched
            return found
        found.add(f"url:{host}{path}{'?' + parts.query if parts.query else ''}")
    last = path.rsplit("/", 1)[-1]
    for pattern, where in ((_COCO_LONG, last), (_COCO_SHORT, last), (_COCO_FOLDER, path)):
        if match := pattern.search(where):
            found.add(f"coco:{int(match[1])}")
    if match := _GENOME.search(path):
        found.add(f"visual_genome:{int(match[1])}")
    if match := _NLVR2.match(last):
        found.add(f"nlvr2:{match[1].lower()}")
    at_flickr = host in ("flickr.com", "staticflickr.com") or host.endswith((".flickr.com", ".staticflickr.com"))
    if (not web or at_flickr) and (match := _FLICKR.match(last)):
        found.add(f"flickr:{int(match[1])}")
    if at_flickr and (match := _FLICKR_PAGE.match(path)):
        found.add(f"flickr:{int(match[1])}")
    if not web and not found and (match := _NUMBER.match(last)):
        said = f"{hint}/{path}".lower()
        if "flickr" in said or (len(match[1]) >= 8 and not last.startswith("0")):
            found.add(f"flickr:{int(match[1])}")
        elif "visual_genome" in said or "visualgenome" in said or "vg_" in said or hint.lower() == "vg":
            found.add(f"visual_genome:{int(match[1])}")
    return found


_FILES = ("file_name", "filename", "image", "img", "img_path", "image_path", "path", "name", "img_fn")
_URLS = ("url", "coco_url", "flickr_url", "image_url", "left_url", "right_url", "flickr_640_url")
_IDS: dict[str, Kind] = {
    "cocoid": "coco",
    "coco_id": "coco",
    "coco_image_id": "coco",
    "original_id": "coco",  # MDETR's lists, whose `id` counts their own lines
    "flickr_id": "flickr",
    "flickr30k_id": "flickr",
    "flickr30kid": "flickr",
    "vg_id": "visual_genome",
}


def entry_names(entry: Any, numbers: Kind) -> set[str]:
    """The names of the picture that an entry of a data set's list speaks of.

    `entry` is a JSON value: a text, a number, or an object with any of the usual keys. `numbers` says whose ids bare
    numbers are, `image_id` and `id` included; these two count only where the entry says nothing clearer.
    """
    if isinstance(entry, bool) or entry is None:
        return set()
    if isinstance(entry, int):
        return {f"{numbers}:{entry}"} if entry >= 0 else set()
    if isinstance(entry, str):
        text = entry.strip()
        if match := _NUMBER.match(text):
            return names_of(text) if _COCO_SHORT.search(text) else {f"{numbers}:{int(match[1])}"}
        return names_of(text, numbers)
    if not isinstance(entry, dict):
        return set()
    found: set[str] = set()
    keys = {key.lower(): value for key, value in entry.items() if isinstance(key, str)}
    for file in entry_files(entry):
        found |= entry_names(file, numbers)
    for key in _URLS:
        if isinstance(keys.get(key), str):
            found |= names_of(keys[key])
    for key, kind in _IDS.items():
        found |= {f"{kind}:{int(keys[key])}"} if _is_id(keys.get(key)) else set()
    if isinstance(keys.get("identifier"), str) and (match := _NLVR2_PAIR.match(keys["identifier"])):
        found |= {f"nlvr2:{match[1]}-img0", f"nlvr2:{match[1]}-img1"}
    own = keys.get("image_id", keys.get("id"))
    if own is not None and "coco_id" in keys and _is_id(own):  # Visual Genome's image_data.json
        return found | {f"visual_genome:{int(own)}"}
    for key in ("image_id", "imageid", "id"):
        # an `id` beside a clear name may count the list's own lines
        clear = ("coco:", "flickr:", "visual_genome:") if key == "id" else (f"{numbers}:",)
        if _is_id(keys.get(key)) and not any(name.startswith(clear) for name in found):
            found.add(f"{numbers}:{int(keys[key])}")
    return found


def entry_files(entry: Any) -> Iterator[str]:
    """The file names in an entry of a data set's list, with their folder where it names one."""
    if isinstance(entry, str):
        yield entry.strip()
    if not isinstance(entry, dict):
        return
    folder = entry.get("filepath")
    for key in _FILES:
        value = entry.get(key)
        if isinstance(value, str) and value:
            yield f"{folder}/{value}" if key == "filename" and isinstance(folder, str) and folder else value
    if isinstance(entry.get("images"), list):  # NLVR2: two
        yield from (value for value in entry["images"] if isinstance(value, str))


def _is_id(value: Any) -> bool:
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) <= 18
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def show(name: str, names: set[str]) -> str:
    """Which of a picture's names to show where it is known by `name`: its surest, unless `name` is one of several URLs.

    NLVR2's entries speak of two pictures, which have no other name in common.
    """
    if name.startswith(("url:", "nlvr2:")):
        return name
    return min(names, key=lambda each: (KINDS.index(each.partition(":")[0]), each))
