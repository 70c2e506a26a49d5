"""What all tests share."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
CLUSTERED = ("test_training_ray", "test_sharing")  # modules whose functions run on the cluster


# Machines that run tests are shared and noisy, and what a change broke must be told from what a draw found.
settings.register_profile("vlp", deadline=None, derandomize=True)
settings.load_profile("vlp")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook, and would find none
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what `make test` runs together: what shares a cluster or a server, those first, and else a module.

    The long ones wait more than they compute, so that the other process has the machine meanwhile.
    """

    parts: dict[str, list[pytest.Item]] = {"ray": [], "prefect": [], "": []}
    for item in items:
        shared = next((name for name in ("ray", "prefect") if item.get_closest_marker(name)), "")
        parts[shared].append(item)
        item.add_marker(pytest.mark.xdist_group(shared or item.nodeid.partition("::")[0]))
    items[:] = [item for part in parts.values() for item in part]


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    """A test's web server ends with it: one whose socket is closed under its loop would slow every later test."""
    yield
    left = [thread.name for thread in threading.enumerate() if "serve_forever" in thread.name]
    assert not left, f"{len(left)} servers are left running"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout (VLP_SHARED, default ../shared)."""
    folder = Path(os.environ.get("VLP_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: it holds the real data for these tests (set VLP_SHARED)")
    return folder


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of reference numbers (VLP_REFERENCE_DIR, default ../shared/reference)."""
    folder = Path(os.environ.get("VLP_REFERENCE_DIR", ROOT.parent / "shared" / "reference"))
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: it holds the published code's numbers (set VLP_REFERENCE_DIR)")
    return folder


@pytest.fixture(scope="module")
def ray_cluster():
    """One local Ray cluster with two cores; its workers unpickle the tests' own modules by value."""
    import sys

    import ray
    from ray import cloudpickle

    started = not ray.is_initialized()
    if started:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20
        )
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) and name.rpartition(".")[2] in CLUSTERED:
            cloudpickle.register_pickle_by_value(module)
    yield
    if started:
        ray.shutdown()
