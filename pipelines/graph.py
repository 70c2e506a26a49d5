"""DVC's own graph of the stages, and what of it is up to date. Imports DVC, which takes a second."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.io.errors import UserError
from pipelines.messages import suggestion
from pipelines.stages import ROOMS, STAGES, Stage

END_TO_END = "end-to-end"
FLOWS: dict[str, tuple[str, ...]] = {**{room: (room,) for room in ROOMS}, END_TO_END: tuple(ROOMS)}


def check_flow(name: str) -> None:
    """Raise UserError unless there is a flow of that name."""
    if name not in FLOWS:
        raise UserError(f"{name} is no flow; {suggestion(name, list(FLOWS), 'flows')}")


@dataclass(frozen=True)
class Step:
    """One stage of the graph: its address (``clean``, ``finetune@retrieval``) and those it waits for."""

    address: str
    upstream: tuple[str, ...]

    @property
    def stage(self) -> Stage:
        """The stage of the address's name."""
        return STAGES[self.address.partition("@")[0]]


def read_graph(root: Path) -> list[Step]:
    """All stages of the DVC repository at `root`, each after those it depends on.

    Raises UserError with DVC's message when `root` is no DVC repository or its ``dvc.yaml`` is wrong.
    """
    with _repository(root) as repository:
        return _steps(repository)


def read_state(root: Path) -> tuple[list[Step], frozenset[str]]:
    """`read_graph`, and the addresses of the stages that DVC finds not up to date.

    In one reading of ``dvc.yaml`` and ``dvc.lock``, which takes most of a second; `is_current` reads them each time.
    """
    with _repository(root) as repository:
        stale = frozenset(repository.status())
        return _steps(repository), stale


def _steps(repository: Any) -> list[Step]:
    import networkx as nx

    graph = repository.index.graph  # an edge leads from a stage to one it depends on
    position = {stage: number for number, stage in enumerate(repository.index.stages)}
    ordered = nx.lexicographical_topological_sort(graph.reverse(), key=position.__getitem__)
    return [
        Step(stage.addressing, tuple(sorted(upstream.addressing for upstream in graph.successors(stage))))
        for stage in ordered
    ]


def is_current(address: str, root: Path) -> bool:
    """Whether DVC finds the stage up to date: command, dependencies, parameters and outs as in ``dvc.lock``."""
    with _repository(root) as repository:
        return not repository.status(targets=[address])


def select(steps: list[Step], flow: str) -> tuple[list[Step], list[Step]]:
    """The stages that the flow runs, and those of other rooms that these wait for, however far up."""
    rooms = FLOWS[flow]
    own = [step for step in steps if step.stage.room in rooms]
    by_address = {step.address: step for step in steps}
    seen: set[str] = set()
    waiting = [address for step in own for address in step.upstream]
    while waiting:
        address = waiting.pop()
        if address not in seen:
            seen.add(address)
            waiting.extend(by_address[address].upstream)
    return own, [step for step in steps if step.address in seen and step not in own]


class _repository:  # noqa: N801 - a context manager that is used like a function
    """An open DVC repository whose own errors become the user's."""

    def __init__(self, root: Path) -> None:
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        self._errors: type[Exception] = DvcException
        try:
            self._repo = Repo(str(root))
        except DvcException as error:
            raise UserError(
                f"{root} is not a DVC repository inside a git one ({error}): run vlp in the clone"
            ) from None

    def __enter__(self) -> Any:
        return self._repo

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._repo.close()
        if isinstance(error, self._errors):
            raise UserError(f"dvc: {' '.join(str(error).split())}") from None
