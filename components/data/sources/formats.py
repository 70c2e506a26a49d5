"""The layouts of source lists, by name. Light to import: parameters name them."""

from typing import Literal

Format = Literal["auto", "tsv", "parquet", "albef", "karpathy", "coco", "visual_genome", "refcoco", "clevr", "folder"]
