"""Whether a bucket will do, found out before a cluster is paid for: there, in its region, writable, private."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

from components.io.errors import UserError

CONNECT_SECONDS, READ_SECONDS, TRIES = 10.0, 30.0, 3
PART = 5 * 1024 * 1024  # the smallest part that S3 takes


def check_bucket(address: str, region: str | None = None) -> list[str]:
    """Try on ``s3://bucket/prefix`` what a run does: write, read, write in parts, delete. Returns what was found.

    Keys come from the environment or a role, the endpoint from AWS_ENDPOINT_URL. Nothing that was written stays.
    Raises UserError with the first thing that fails, and what to do.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectionClosedError,
        ConnectTimeoutError,
        EndpointConnectionError,
        ReadTimeoutError,
    )

    bucket, _, prefix = address.removeprefix("s3://").partition("/")
    key = f"{prefix.strip('/') + '/' if prefix.strip('/') else ''}.vlp-preflight-{uuid.uuid4().hex}"
    step = "is reached"
    try:
        tries = {"mode": "standard", "total_max_attempts": TRIES}
        config = Config(retries=tries, connect_timeout=CONNECT_SECONDS, read_timeout=READ_SECONDS)
        client = boto3.client("s3", config=config)
        step = "exists and may be seen"
        client.head_bucket(Bucket=bucket)
        step = "tells its region"
        there = client.get_bucket_location(Bucket=bucket).get("LocationConstraint") or "us-east-1"
        if region and there != region:
            raise UserError(f"{address} is in {there}, the cluster in {region}: traffic between them is slow and costs")
        step = "may be written to"
        try:
            client.put_object(Bucket=bucket, Key=key, Body=b"vlp")
            step = "may be read"
            client.get_object(Bucket=bucket, Key=key)["Body"].read()
            step = "may be written to in parts"
            _in_parts(client, bucket, key)
        except (BotoCoreError, ClientError):
            with suppress(BotoCoreError, ClientError):  # the first failure is the one to tell
                client.delete_object(Bucket=bucket, Key=key)
            raise
        step = "lets objects be deleted"
        client.delete_object(Bucket=bucket, Key=key)
        done = f"{bucket} is in {there}; objects can be written, read, written in parts and deleted"
        return [done, *_privacy(client, bucket)]
    except (ConnectTimeoutError, ReadTimeoutError):
        raise UserError(
            f"{address}: no answer within {READ_SECONDS:g} s, {TRIES} times, on trying that the bucket {step}: "
            "its region, a proxy or the network between is too slow for a training, or AWS_ENDPOINT_URL is another's"
        ) from None
    except (ConnectionClosedError, EndpointConnectionError) as error:
        raise UserError(
            f"{address}: refused, {TRIES} times, on trying that the bucket {step} ({error}): see AWS_ENDPOINT_URL, "
            "and whether this machine may reach it"
        ) from None
    except (BotoCoreError, ClientError) as error:
        raise UserError(
            f"{address}: not so that the bucket {step}: {error}; infra/iam-policy.json has what is needed"
        ) from None


def _in_parts(client: Any, bucket: str, key: str) -> None:
    upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    try:
        parts = []
        for number, body in enumerate((b"\0" * PART, b"vlp"), 1):
            part = client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=body)
            parts.append({"PartNumber": number, "ETag": part["ETag"]})
        client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})
    except Exception:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
        raise


def _privacy(client: Any, bucket: str) -> list[str]:
    """Warnings, where the settings may be read at all: not being allowed to look is no reason to stop."""
    from botocore.exceptions import ClientError

    warnings = []
    try:
        block = client.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
        if not all(block.values()):
            warnings.append(f"warning: {bucket} does not block all public access")
    except ClientError as error:
        if "NoSuchPublicAccessBlock" in str(error):
            warnings.append(f"warning: {bucket} does not block public access")
        else:
            warnings.append(f"whether {bucket} blocks public access could not be seen")
    try:
        client.get_bucket_encryption(Bucket=bucket)
    except ClientError:
        warnings.append(f"whether {bucket} is encrypted by default could not be seen")
    return warnings
