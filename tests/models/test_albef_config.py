import subprocess
import sys

import pytest
from pydantic import ValidationError

from models.albef.config import AlbefConfig
from models.albef.model import Albef


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


def test_untrained_weights_have_the_asked_deviation() -> None:
    for std in (0.02, 0.1):
        config = AlbefConfig(
            image_size=32,
            vision_width=64,
            vision_depth=2,
            vision_heads=2,
            text_width=64,
            text_layers=2,
            fusion_layers=1,
            text_heads=2,
            text_intermediate=128,
            embed_dim=16,
            queue_size=0,
            init_std=std,
        )
        model = Albef(config)
        for weight in (
            model.visual_encoder.blocks[1].mlp.fc1.weight,
            model.text_encoder.bert.encoder.layer[1].crossattention.self.query.weight,
        ):
            assert weight.std().item() == pytest.approx(std, rel=0.1)
