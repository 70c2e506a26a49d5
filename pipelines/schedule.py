"""Scheduled runs: work pool, deployments and automations on the Prefect server, from the files in ``infra/``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelines.quiet import be_quiet

be_quiet()  # before Prefect is imported

from components.io.errors import UserError  # noqa: E402
from pipelines.params import read_yaml  # noqa: E402

DEPLOYMENTS = Path("infra", "prefect.yaml")
AUTOMATIONS = Path("infra", "automations.yaml")
FAILED = "vlp: failed"


def schedule(root: Path, *, notify: str = "", deployments: Path = DEPLOYMENTS, automations: Path = AUTOMATIONS) -> str:
    """Create what the files describe on the Prefect server, or bring it up to date; returns what to do next.

    `notify` names a Prefect notification block as TYPE/NAME (``slack-webhook/team``) that hears of failed and crashed
    runs. Raises UserError when no server is set up or answers, a file is wrong, or there is no such block.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if not url:
        raise UserError("no Prefect server is set up: `prefect server start`, then set PREFECT_API_URL to its address")
    described = read_yaml(root / automations)["automations"]
    pools = {deployment["work_pool"]["name"] for deployment in read_yaml(root / deployments)["deployments"]}
    with get_client(sync_client=True) as client:
        if error := client.api_healthcheck():
            raise UserError(f"no Prefect server answers at {url} ({type(error).__name__})")
        if notify:
            described = [*described, _notification(client, notify)]
        for pool in sorted(pools):
            _ensure_pool(client, pool)
        _deploy(root, deployments, url)
        for automation in described:
            _ensure_automation(client, automation)
    return f"deployed; start a worker in {root.name}: prefect worker start --pool {' '.join(sorted(pools))}"


def _ensure_pool(client: Any, name: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))


def _deploy(root: Path, deployments: Path, url: str) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(deployments)]
    environment = {**os.environ, "PREFECT_API_URL": url}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise UserError(f"{deployments}: Prefect did not take it: {' '.join(' '.join(lines[-3:]).split())}")


def _ensure_automation(client: Any, described: dict[str, Any]) -> None:
    from prefect.events.schemas.automations import AutomationCore
    from pydantic import ValidationError

    try:
        automation = AutomationCore.model_validate(described)
    except ValidationError as error:
        raise UserError(f"{AUTOMATIONS}: {described.get('name')}: {' '.join(str(error).split())}") from None
    known = client.read_automations_by_name(automation.name)
    if known:
        client.update_automation(known[0].id, automation)
    else:
        client.create_automation(automation)


def _notification(client: Any, notify: str) -> dict[str, Any]:
    """The automation that tells of failed and crashed runs through a block."""
    from prefect.exceptions import ObjectNotFound

    kind, slash, name = notify.partition("/")
    if not (kind and slash and name):
        raise UserError(f"{notify}: write the notification block as TYPE/NAME, as in slack-webhook/team")
    try:
        block = client.read_block_document_by_name(name, kind)
    except ObjectNotFound:
        raise UserError(f"Prefect has no block {notify}: create it on the Prefect page, under Blocks") from None
    return {
        "name": FAILED,
        "description": "Tells of runs that failed or crashed.",
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "match": {"prefect.resource.id": "prefect.flow-run.*"},
            "match_related": {"prefect.resource.id": "prefect.tag.vlp", "prefect.resource.role": "tag"},
            "for_each": ["prefect.resource.id"],
            "expect": ["prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"],
            "threshold": 1,
            "within": 0,
        },
        "actions": [
            {
                "type": "send-notification",
                "block_document_id": str(block.id),
                "subject": "vlp: {{ flow.name }} {{ flow_run.state.name }}",
                # a server without a page gives no address
                "body": "{{ deployment.name }}: {{ flow_run.state.message }}\n{{ flow_run|ui_url or flow_run.id }}",
            }
        ],
    }
