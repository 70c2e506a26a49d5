"""What the child processes of `test_kills` run, apart from pytest so that they can import it quickly."""

from pathlib import Path

from components.data.clean import CleanParams, clean
from components.data.download import DownloadParams, SourceParams, download
from components.io import work
from components.io.runtime import Runtime

# what the stages import when they run: loaded once, in the server that children are forked from
PRELOAD = ["tests.data.killing", "components.data.fetching.outs", "components.data.fetching.retrying"]
PRELOAD += ["components.data.cleaning.pictures", "components.data.cleaning.captions", "components.data.parts"]


def both(site: str, folder: str) -> None:
    """`download` and `clean` of the list at `site`, with outs and work in `folder`."""
    work.code_digest = lambda *_: "fixed"  # type: ignore[assignment]
    runtime = Runtime(processes=1, work=Path(folder) / "work")
    place = SourceParams(path=Path(site), serve="web")
    params = DownloadParams(sources={"src": place}, records_per_file=15, retries=0, placeholder_urls=4)
    if not (Path(folder) / "raw/src/manifest.json").is_file():
        download(params, source="src", input=Path(site), raw=Path(folder) / "raw/src", runtime=runtime)
    rules = CleanParams(picture={"min_side": 16})
    clean(rules, raw=Path(folder) / "raw", clean=Path(folder) / "clean", runtime=runtime)
