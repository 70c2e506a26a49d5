"""Parameters of the web's ills, apart from the code that needs Pillow."""

from __future__ import annotations

from pydantic import BaseModel, Field

MOST = 100_000


def _count(default: int, description: str) -> int:
    field: int = Field(default=default, ge=0, le=MOST, description=description)
    return field


class WebParams(BaseModel, frozen=True, extra="forbid"):
    """How many ills of each kind the source list and its web server have."""

    # reading the list
    malformed_lines: int = _count(25, "lines that are not caption<TAB>url, or not UTF-8")
    missing_urls: int = _count(10, "lines whose URL is empty")
    repeated_lines: int = _count(30, "lines that stand in the list twice (the second ones are counted)")
    # URLs that must not be asked
    invalid_urls: int = _count(10, "URLs that cannot be parsed or have no host")
    foreign_schemes: int = _count(15, "URLs that are neither http nor https")
    credentials: int = _count(10, "URLs with user and password")
    long_urls: int = _count(5, "URLs over the usual limit of length")
    forbidden_hosts: int = _count(20, "URLs of loopback, private and metadata addresses; every fourth by a redirect")
    # fetching
    dead_hosts: int = _count(40, "URLs of hosts that do not exist")
    not_found: int = _count(60, "URLs answered with 404 or 410")
    refused: int = _count(20, "URLs answered with 403")
    redirect_loops: int = _count(10, "URLs that redirect for ever")
    html_as_jpeg: int = _count(30, "pages of HTML sent as image/jpeg")
    empty_files: int = _count(10, "answers of no bytes")
    redirects: int = _count(50, "pictures whose URL redirects to them, by one step or two (no ill: they arrive)")
    # pictures and captions
    truncated_files: int = _count(30, "pictures whose end is missing")
    empty_captions: int = _count(30, "captions of which nothing is left after cleaning")
    long_captions: int = _count(40, "captions of more than 30 words")
    wrong_captions: int = _count(0, "captions of another scene, as the web's alt texts are: no stage can tell them")
    # duplicates and leaks
    exact_duplicates: int = _count(50, "pictures at a second URL, byte for byte, with a caption that they have already")
    merged_duplicates: int = _count(30, "the same, with a caption of its own")
    near_duplicates: int = _count(50, "pictures at a second URL, compressed again or resized, with the same caption")
    exact_leaks: int = _count(30, "pictures of val and test, byte for byte")
    near_leaks: int = _count(30, "pictures of val and test, compressed again or resized")

    @property
    def train_scenes(self) -> int:
        """Training scenes that have an ill of their own: a row must not suffer from two."""
        own = (self.repeated_lines, self.redirects, self.truncated_files, self.empty_captions, self.long_captions)
        return sum(own) + self.exact_duplicates + self.merged_duplicates + self.near_duplicates

    @property
    def evaluation_scenes(self) -> int:
        """Evaluation scenes whose picture leaks into the source list."""
        return self.exact_leaks + self.near_leaks
