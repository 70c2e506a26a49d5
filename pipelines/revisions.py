"""Git beside the working folder: committing a run's lock file to a branch of its own, and finding the code of a run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from components.io.errors import UserError

RUN_FILES = ("dvc.lock", "params.yaml")


def commit_run(root: Path, branch: str, message: str, *, push_to: str = "") -> str:
    """Commit ``dvc.lock`` and ``params.yaml`` as they are to `branch`; returns the commit: the tip if nothing changed.

    The working folder, the index and the branch that is checked out stay as they are. The branch starts at HEAD; each
    later commit follows the branch's tip, and HEAD too where that moved on. `push_to` names a git remote to send it to.
    Raises UserError when git refuses.
    """
    head = git(root, "rev-parse", "--verify", "HEAD")
    reference = f"refs/heads/{branch}"
    git(root, "check-ref-format", "--branch", branch)
    if branch == git(root, "branch", "--show-current"):
        raise UserError(f"{branch} is checked out: runs are committed to a branch of their own, such as `runs`")
    tip = git(root, "rev-parse", "--verify", "--quiet", reference, check=False)
    with tempfile.TemporaryDirectory(prefix="vlp-") as scratch:
        environment = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        git(root, "read-tree", "HEAD", environment=environment)
        files = [name for name in RUN_FILES if (root / name).is_file()]
        git(root, "add", "--force", "--", *files, environment=environment)
        tree = git(root, "write-tree", environment=environment)
    if tip and tree == git(root, "rev-parse", f"{tip}^{{tree}}"):
        commit = tip
    else:
        parents = [tip or head]
        if tip and git(root, "merge-base", head, tip) != head:
            parents.append(head)
        flags = [flag for parent in parents for flag in ("-p", parent)]
        commit = git(root, "commit-tree", tree, *flags, "-m", message, environment=_identity(root))
        git(root, "update-ref", reference, commit, tip or "0" * len(commit))
    if push_to:
        git(root, "push", "--quiet", push_to, f"{reference}:{reference}")
    return commit


def commits_of(root: Path, files: Mapping[str, str]) -> list[str]:
    """Commits that hold exactly these files, newest first; `files` maps paths to their md5 in ``dvc.lock``.

    Looks at every commit, of whatever branch, that changed one of the files. Each result stands for itself and for the
    commits after it that left the files alone. Empty where the code was never committed.
    """
    if not files:
        return []
    listed = git(root, "log", "--all", "--format=%H", "--", *files)
    return [commit for commit in listed.split() if _holds(root, commit, files)]


def git(root: Path, *arguments: str, environment: Mapping[str, str] | None = None, check: bool = True) -> str:
    """What git prints, stripped. Raises UserError with git's message when it fails and `check` is set."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", **(environment or {})},
        )
    except FileNotFoundError:
        raise UserError("git is not installed, and versions are kept in it: install it") from None
    if check and done.returncode != 0:
        command = next(word for word in arguments if not word.startswith("-"))
        raise UserError(f"git {command}: {' '.join(done.stderr.split()) or f'ended with {done.returncode}'}")
    return done.stdout.strip()


def _identity(root: Path) -> dict[str, str]:
    """A name to commit under where git knows none, as in a container."""
    if git(root, "config", "user.email", check=False):
        return {}
    who = {"NAME": "vlp", "EMAIL": "vlp@localhost"}
    return {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}


def _holds(root: Path, commit: str, files: Mapping[str, str]) -> bool:
    blobs = dict(_blobs(root, commit, tuple(files)))
    return len(blobs) == len(files) and all(_md5(root, blobs[path]) == md5 for path, md5 in files.items())


def _blobs(root: Path, commit: str, paths: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for entry in git(root, "ls-tree", "-r", "-z", commit, "--", *paths).split("\0"):
        if entry:
            kind, _, path = entry.partition("\t")
            yield path, kind.split()[2]


@cache
def _md5(root: Path, blob: str) -> str:
    """DVC's hash of a file that git holds. Not for security: it names contents, as DVC does."""
    done = subprocess.run(["git", "cat-file", "blob", blob], cwd=root, capture_output=True, check=True)
    return hashlib.md5(done.stdout, usedforsecurity=False).hexdigest()
