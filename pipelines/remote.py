"""The outs of all stages to and from DVC's remote, and source lists that DVC imports. Imports DVC, a second.

What `dvc pull` does, but a missing object is named by the stage that wrote it: that one would have to run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from components.io.errors import UserError

PUSH_AGAIN = "`vlp push` again sends what is not there yet"


class MissingObjectsError(UserError):
    """The remote lacks outs of some stages; `stages` holds their addresses. All other outs are in place."""

    def __init__(self, message: str, stages: list[str]) -> None:
        super().__init__(message)
        self.stages = stages


def default_remote(root: Path) -> str | None:
    """The name of the remote that DVC uses unless told otherwise; None when none is set up."""
    with _repository(root) as repository:
        name: str | None = repository.config["core"].get("remote")
        return name


def pull(root: Path) -> int:
    """Bring all outs that ``dvc.lock`` names into the cache and the working folder; returns how many files came.

    Raises MissingObjectsError when the remote lacks some; UserError when it does not answer or none is set up.
    """
    from dvc.exceptions import CheckoutError, DownloadError

    with _repository(root) as repository:
        _check_remote(repository)
        try:
            stats = repository.pull(run_cache=True)["stats"]
            return int(stats["fetched"])
        except (DownloadError, CheckoutError, AssertionError) as error:
            if isinstance(error, AssertionError):  # DVC's own, where a folder's list of files is seen but not given
                _fetch_each(repository)
            missing = {
                str(out): stage.addressing for stage in repository.index.stages for out in stage.outs if _lacks(out)
            }
            if not missing:
                raise UserError(f"the DVC remote could not be read: {error}") from error
            repository.checkout(allow_missing=True, force=False)
        stages = list(dict.fromkeys(missing.values()))
        raise MissingObjectsError(
            f"the DVC remote lacks objects of {_some(list(missing))}, which {_stages(stages)} wrote: "
            "run `dvc repro` to make them again, then `vlp push`",
            stages,
        )


def push(root: Path) -> int:
    """Send all outs and the run cache to the remote; returns how many files went. Raises UserError."""
    from dvc.exceptions import UploadError

    with _repository(root) as repository:
        _check_remote(repository)
        try:
            return _send_files(repository) + int(repository.push(run_cache=True))
        except UploadError as error:
            raise UserError(f"the DVC remote could not be written to: {error}; {PUSH_AGAIN}") from error


def refresh(root: Path) -> list[str]:
    """Bring source lists that `dvc import-url` or `dvc import` track up to date; returns the paths of all of them."""
    with _repository(root) as repository:
        imports = [stage for stage in repository.index.stages if stage.is_import]
        if imports:
            repository.update(targets=[stage.addressing for stage in imports])
        return [str(out) for stage in imports for out in stage.outs]


def _check_remote(repository: Any) -> None:
    if not repository.config["core"].get("remote"):
        raise UserError(
            "no DVC remote is set up: `dvc remote add --default NAME URL`, where URL is a folder or s3://bucket/prefix"
        )


def _fetch_each(repository: Any) -> None:
    """Bring what the remote gives of each stage's outs, since DVC stops at the first folder that it does not give."""
    from dvc.exceptions import DownloadError

    for stage in repository.index.stages:
        if any(_lacks(out) for out in stage.outs):
            with suppress(DownloadError, AssertionError):
                repository.fetch(targets=[stage.addressing])


def _send_files(repository: Any) -> int:
    """Send what the remote lacks of the files in folders; returns how many.

    DVC itself looks for a folder's list of files alone, and takes the files for sent where that is there: a remote that
    lost one would never get it back.
    """
    from dvc_data.hashfile.transfer import transfer
    from dvc_data.hashfile.tree import Tree

    remote = repository.cloud.get_remote()
    if remote.fs.version_aware or remote.worktree:
        return 0
    outs = [out for stage in repository.index.stages for out in stage.outs if out.can_push and not _lacks(out)]
    trees = [tree for out in outs if isinstance(tree := out.get_obj(), Tree)]
    files = {hash_info for tree in trees for _, _, hash_info in tree}
    done = transfer(repository.cache.local, remote.odb, files)
    if done.failed:
        raise UserError(f"the DVC remote could not be written to: {len(done.failed)} files failed; {PUSH_AGAIN}")
    return len(done.transferred)


def _lacks(out: Any) -> bool:
    """Whether the cache is without the out, or without files of it, although ``dvc.lock`` names it."""
    return bool(out.use_cache and out.hash_info and out.changed_cache())


def _stages(addresses: list[str]) -> str:
    return f"the stage{'s' if addresses[1:] else ''} {_some(addresses)}"


def _some(names: list[str], most: int = 4) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if names[most:] else "")


@contextmanager
def _repository(root: Path) -> Iterator[Any]:
    """DVC's repository; what DVC or the storage's library raises for want of a remote comes out as UserError."""
    from botocore.exceptions import BotoCoreError, ClientError
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc_objects.fs.errors import AuthError, RemoteMissingDepsError

    try:
        with Repo(str(root)) as repository:
            yield repository
    except (DvcException, AuthError, RemoteMissingDepsError) as error:
        raise UserError(f"DVC: {error}") from error
    except (OSError, BotoCoreError, ClientError) as error:  # refused connections, buckets that are not there
        raise UserError(f"the DVC remote does not answer: {error}") from error
