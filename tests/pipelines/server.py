"""What the tests ask a Prefect server. It learns of task runs by events, so it may know less than a flow that ended."""

import time
from collections.abc import Callable, Collection
from typing import Any
from uuid import UUID


def eventually(find: Callable[[], Any], what: str, seconds: float = 120) -> Any:
    """What `find` returns once that is something."""
    until = time.monotonic() + seconds
    while True:
        if found := find():
            return found
        assert time.monotonic() < until, f"in {seconds} s: no {what}"
        time.sleep(0.1)


def task_runs(client: Any, run: UUID, names: Collection[str]) -> list[tuple[str, str]]:
    """A flow run's tasks as (name, state's name) in order of start, once the newest of each that is named has ended."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    def recorded() -> tuple[list[Any]] | None:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run])))
        found.sort(key=lambda one: one.start_time or one.created)
        newest = {one.name: one.state for one in found}
        return (found,) if all(name in newest and newest[name].is_final() for name in names) else None

    (found,) = eventually(recorded, f"record of {', '.join(names)} as ended")
    return [(one.name, one.state.name) for one in found]
