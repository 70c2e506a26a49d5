"""How often a failed stage is tried again, after how long, and how long it may take: one policy per kind of stage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What a flow does about a stage that fails or never ends.

    `delays` holds the seconds before each further attempt, so its length is the number of retries.
    """

    delays: tuple[float, ...]
    hours: float  # after which a stage is interrupted, as by Ctrl-C: it resumes in the next attempt

    @property
    def retries(self) -> int:
        """How many attempts follow the first."""
        return len(self.delays)

    def limited(self, retries: int | None) -> Policy:
        """The policy with another number of retries: the last delay is repeated, a minute where there is none."""
        if retries is None:
            return self
        last = self.delays[-1] if self.delays else 60.0
        return Policy((*self.delays, *[last] * retries)[:retries], self.hours)


# by stage where a stage is unlike the others of its room, else by room; `transfer` is for remotes and publishing
POLICIES: dict[str, Policy] = {
    "download": Policy((60.0, 600.0, 3600.0), hours=72),  # the web has bad hours; what was fetched is kept
    "validate": Policy((), hours=12),  # the same data fail again
    "data": Policy((60.0,), hours=48),
    "training": Policy((60.0, 600.0), hours=24 * 30),  # machines are lost; training resumes from its checkpoint
    "evaluation": Policy((60.0,), hours=24),
    "transfer": Policy((10.0, 60.0, 600.0), hours=24),
}


def policy_of(stage: str, room: str) -> Policy:
    """The policy of a stage by its name, else by its room."""
    return POLICIES.get(stage, POLICIES[room])
