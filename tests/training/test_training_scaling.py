"""The scaling page's table is what its script prints; the GPU check skips where there is no GPU."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_smoke, scaling

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_holds_the_scripts_table(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scaling.py"])
    scaling.main()
    printed = capsys.readouterr().out
    table = printed[printed.index("| |") :]
    assert table in (ROOT / "docs/scaling.md").read_text()


def test_without_a_gpu_the_check_says_so_and_ends_well(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_smoke.py"])
    with pytest.raises(SystemExit) as ended:
        gpu_smoke.main()
    assert ended.value.code == 0
    assert "skipped, this machine has no GPU" in capsys.readouterr().out
