"""The documentation builds, its links lead somewhere, and what it quotes of the program is there."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


class Links(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if given.get("id"):
            self.anchors.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") == "stylesheet":
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built pages by path, and the folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [str(Path(sys.executable).with_name("properdocs")), "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run([*command, "-f", "properdocs.yml"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {}
    for path in folder.rglob("*.html"):
        if path.name not in ("404.html", "search.html"):
            pages[path] = Links()
            pages[path].feed(path.read_text())
    return folder, pages


def test_every_page_is_built_and_in_the_menu(site):
    folder, pages = site
    for page in PAGES:
        built = folder / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built in pages, page.name
    front = {urlparse(link).path.strip("./") for link in pages[folder / "index.html"].links}
    assert {page.stem for page in PAGES if page.stem != "index"} <= front


def test_links_lead_somewhere(site):
    folder, pages = site
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlparse(link)
            if parts.scheme or parts.netloc:
                assert parts.scheme == "https", f"{path}: {link}"
                continue
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if parts.path.startswith("/"):
                goal = folder / parts.path.lstrip("/")
            goal = goal / "index.html" if goal.is_dir() else goal
            assert goal.is_file(), f"{path.relative_to(folder)}: {link} leads nowhere"
            if parts.fragment and goal in pages:
                assert parts.fragment in pages[goal].anchors, f"{path.relative_to(folder)}: {link}"


def test_pages_load_nothing_from_elsewhere(site):
    for path, page in site[1].items():
        assert not [load for load in page.loads if urlparse(load).netloc], path


def test_commands_are_those_of_the_program():
    from pipelines.cli import app

    known = set(typer.main.get_command(app).commands)
    for page in [*PAGES, ROOT / "README.md"]:
        for command in re.findall(r"(?:^|`)vlp ([a-z]+)", page.read_text(), re.MULTILINE):
            assert command in known, f"{page.name}: vlp {command}"


def test_messages_are_those_of_the_program():
    source = "".join(
        path.read_text() for package in ("pipelines", "components") for path in (ROOT / package).rglob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a sentence over several lines
    quoted = re.findall(r"^(`.+`)$", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
    assert len(quoted) > 20
    # DVC's; Ray's; put together
    ours = {
        "Unable to acquire lock",
        "The worker group startup timed out",
        "was ended by SIGKILL (often for want of memory)",
    }
    for line in quoted:
        for message in re.findall(r"`([^`]+)`", line):
            parts = [part.strip(" ;:") for part in message.split("…")]
            for part in parts:
                assert not part or part in ours or part in source, f"failures.md: {message!r}: {part!r} is said nowhere"


def test_files_that_are_named_are_there():
    for page in PAGES:
        for name in re.findall(
            r"`((?:infra|pipelines|components|models|tests|benchmarks)/[\w./-]+)`", page.read_text()
        ):
            example = "caption_stats" in name or "NAME" in name
            assert example or (ROOT / name).exists(), f"{page.name}: {name}"
