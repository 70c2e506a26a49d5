"""Copying finished pages to where people look at them: a folder, or a bucket."""

from __future__ import annotations

import mimetypes
import shutil
from pathlib import Path

from components.io.errors import UserError

S3 = "s3://"


def publish_pages(pages: dict[str, Path], target: str) -> dict[str, str]:
    """Copy folders to ``target/NAME``, replacing what stands there; returns the address of each one's index.html.

    `target` is a folder or ``s3://bucket/prefix``; the environment or a role gives the keys and AWS_ENDPOINT_URL the
    endpoint. Folders that are not there are left out. Raises UserError when the target cannot be written to.
    """
    there = {name: folder for name, folder in pages.items() if (folder / "index.html").is_file()}
    if target.startswith(S3):
        return _to_bucket(there, target)
    if "://" in target:
        raise UserError(f"{target} cannot be published to: name a folder or s3://bucket/prefix")
    published = {}
    for name, folder in there.items():
        goal = Path(target).absolute() / name
        staged = goal.with_name(f".{name}.partial")
        try:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.copytree(folder, staged)
            shutil.rmtree(goal, ignore_errors=True)
            staged.rename(goal)
        except OSError as error:
            raise UserError(f"{goal} cannot be written: {error.strerror or error}") from error
        published[name] = (goal / "index.html").as_uri()
    return published


def _to_bucket(pages: dict[str, Path], target: str) -> dict[str, str]:
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = target.removeprefix(S3).partition("/")
    prefix = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
    published = {}
    try:
        client = boto3.client("s3")
        for name, folder in pages.items():
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            for path in sorted(files, key=lambda path: path.name == "index.html"):  # what links comes after its goals
                key = f"{prefix}{name}/{path.relative_to(folder).as_posix()}"
                kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
                client.upload_file(str(path), bucket, key, ExtraArgs={"ContentType": kind})
            published[name] = f"{S3}{bucket}/{prefix}{name}/index.html"
    except (Boto3Error, BotoCoreError, ClientError) as error:
        raise UserError(f"{target} cannot be written: {error}") from error
    return published
