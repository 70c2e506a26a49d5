"""A folder, or a prefix in an S3 bucket, behind one small interface: list, read, write, copy in and out.

Credentials and endpoint come from where boto3 finds them (``AWS_PROFILE``, ``AWS_ENDPOINT_URL``, an instance's role):
never from parameters, which are published with the data. boto3 is imported when a bucket is first asked.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from components.io.errors import UserError

# one slash as well as two: pathlib folds them, and parameters and options are paths
S3_PLACE = re.compile(r"s3:/{1,2}(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?")
PAGE_KEYS = 1000  # per answer; S3 gives no more
MISSING = frozenset({"NoSuchKey", "404", "NotFound"})


class Entry(NamedTuple):
    """One file of a storage."""

    name: str  # below the storage's place, with "/"
    size: int  # bytes
    version: str  # changes when the content does: the bucket's ETag, or the time of the last change


class Storage(Protocol):
    """Files below one place, by names with "/" that stay below it. May be pickled and shared between threads."""

    place: str

    def list(self) -> Iterator[Entry]:
        """All files, in the order of their names."""

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A file's bytes, at most `limit`. Raises FileNotFoundError when there is none of this name."""

    def write(self, name: str, data: bytes) -> None:
        """Put a file there, whole or not at all, in the place of one that is there."""

    def download(self, name: str, path: Path) -> None:
        """Copy a file to `path`, which appears whole. Raises FileNotFoundError when there is none of this name."""

    def upload(self, path: Path, name: str) -> None:
        """Copy the file `path` there, whole or not at all."""

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""


def is_s3(place: str | Path) -> bool:
    """Whether `place` is a bucket's: ``s3://BUCKET/PREFIX``, also as the path that pathlib makes of it."""
    return str(place).startswith("s3:/")


def open_storage(place: str | Path) -> Storage:
    """The storage at a folder (made when first written to) or at ``s3://BUCKET/PREFIX``.

    Raises UserError when `place` begins like a bucket's and is none.
    """
    if not is_s3(place):
        return FolderStorage(Path(place))
    found = S3_PLACE.fullmatch(str(place))
    if found is None:
        raise UserError(f"{str(place).split('@')[-1]!r} is no place in S3: write s3://BUCKET/PREFIX")
    return S3Storage(found["bucket"], (found["prefix"] or "").strip("/"))


def _safe(name: str) -> str:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in name:
        raise ValueError(f"{name!r} does not stay below the storage's place")
    return str(pure)


class FolderStorage:
    """A folder of this machine, or one that all machines mount."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = str(folder)

    def list(self) -> Iterator[Entry]:
        """See `Storage`. Files whose names begin with a dot (unfinished ones) are left out."""
        found = (path for path in self.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
        for name in sorted(path.relative_to(self.folder).as_posix() for path in found):
            status = (self.folder / name).stat()
            yield Entry(name, status.st_size, str(status.st_mtime_ns))

    def read(self, name: str, limit: int | None = None) -> bytes:
        """See `Storage`."""
        with (self.folder / _safe(name)).open("rb") as stream:
            return stream.read(-1 if limit is None else limit)

    def write(self, name: str, data: bytes) -> None:
        """See `Storage`."""
        with _whole(self.folder / _safe(name)) as partial:
            partial.write_bytes(data)

    def download(self, name: str, path: Path) -> None:
        """See `Storage`."""
        with _whole(path) as partial:
            shutil.copyfile(self.folder / _safe(name), partial)

    def upload(self, path: Path, name: str) -> None:
        """See `Storage`."""
        with _whole(self.folder / _safe(name)) as partial:
            shutil.copyfile(path, partial)

    def delete(self, name: str) -> None:
        """See `Storage`."""
        (self.folder / _safe(name)).unlink(missing_ok=True)


class S3Storage:
    """A prefix of a bucket; an empty prefix is the whole bucket."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self.prefix = prefix
        self.place = f"s3://{bucket}/{prefix}".rstrip("/")
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}  # connections are a process's own

    def _s3(self) -> Any:
        if self._client is None:
            import boto3
            from botocore.config import Config

            config = Config(
                retries={"mode": "standard", "total_max_attempts": 5},
                connect_timeout=10,
                read_timeout=60,
                max_pool_connections=64,
            )
            self._client = boto3.session.Session().client("s3", config=config)  # the default session is no thread's own
        return self._client

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{_safe(name)}" if self.prefix else _safe(name)

    def list(self) -> Iterator[Entry]:
        """See `Storage`. Empty objects named like folders, which some tools leave, are left out."""
        start = f"{self.prefix}/" if self.prefix else ""
        with self._errors(""):
            pages = self._s3().get_paginator("list_objects_v2")
            size = {"PageSize": PAGE_KEYS}
            for page in pages.paginate(Bucket=self.bucket, Prefix=start, PaginationConfig=size):
                for item in page.get("Contents", ()):
                    if not item["Key"].endswith("/"):
                        yield Entry(item["Key"][len(start) :], item["Size"], item["ETag"].strip('"'))

    def read(self, name: str, limit: int | None = None) -> bytes:
        """See `Storage`."""
        with self._errors(name):
            body = self._s3().get_object(Bucket=self.bucket, Key=self._key(name))["Body"]
            with body:
                data: bytes = body.read(limit)
            return data

    def write(self, name: str, data: bytes) -> None:
        """See `Storage`."""
        with self._errors(name):
            self._s3().put_object(Bucket=self.bucket, Key=self._key(name), Body=data)

    def download(self, name: str, path: Path) -> None:
        """See `Storage`."""
        with self._errors(name), _whole(path) as partial:
            self._s3().download_file(self.bucket, self._key(name), str(partial))

    def upload(self, path: Path, name: str) -> None:
        """See `Storage`."""
        with self._errors(name):
            self._s3().upload_file(str(path), self.bucket, self._key(name))

    def delete(self, name: str) -> None:
        """See `Storage`."""
        with self._errors(name):
            self._s3().delete_object(Bucket=self.bucket, Key=self._key(name))

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """What S3 refuses, in words; a file that is not there as FileNotFoundError."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        where = f"{self.place}/{name}".rstrip("/")
        try:
            yield
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if name and code in MISSING:
                raise FileNotFoundError(where) from None
            raise UserError(
                f"{where} cannot be used ({code}): check the bucket's name, its rights and region"
            ) from None
        except (BotoCoreError, Boto3Error) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{where} cannot be reached ({reason}): check credentials and AWS_ENDPOINT_URL") from None


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which becomes `path` unless something is raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
