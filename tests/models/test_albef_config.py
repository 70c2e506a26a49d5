import subprocess
import sys

import pytest
from pydantic import ValidationError

from models.albef.config import AlbefConfig


def test_defaults_are_the_papers() -> None:
    config = AlbefConfig()
    assert (config.image_tokens, config.text_only_layers, config.embed_dim) == (257, 6, 256)
    assert (config.queue_size, config.momentum, config.temperature) == (65536, 0.995, 0.07)


def test_json_round_trip() -> None:
    config = AlbefConfig(image_size=64, fusion_layers=3, negative_pool="global")
    assert AlbefConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"image_size": 250}, "image_size=250 must be a multiple of patch_size=16"),
        ({"vision_heads": 7}, "vision_width=768 must be a multiple of vision_heads=7"),
        ({"text_heads": 7}, "text_width=768 must be a multiple of text_heads=7"),
        ({"fusion_layers": 12}, "fusion_layers=12 must be below text_layers=12"),
        ({"temperature": 0.6}, "temperature=0.6 must lie between"),
        ({"vocab_size": 103}, "mask_id=103 must be below vocab_size=103"),
        ({"sep_id": 101}, "must differ"),
        ({"image_siz": 250}, "image_siz"),
    ],
)
def test_contradictions_are_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AlbefConfig.model_validate(settings)


def test_config_imports_no_torch() -> None:
    code = "import sys, models.albef.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
