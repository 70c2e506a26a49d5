"""No telemetry, no look-ups of newer versions, no downloads behind one's back: every library's switch in one place.

Imported before any of the libraries, since each reads its variable on import. A variable that is set already stays,
so that ``HF_HUB_OFFLINE=0 vlp run pretrain`` fetches published weights.
"""

import os

SWITCHES = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    # threads that wait sleep: spinning ones make a step several times slower as soon as anything else runs
    "OMP_WAIT_POLICY": "PASSIVE",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # what there is to say we say; the server gets all
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # with it on, the temporary server met "database is locked"
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # it takes about 20 s on two cores
    "PREFECT_TASKS_REFRESH_CACHE": "true",  # DVC owns the cache
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",  # it warns at each fork otherwise
}


def be_quiet() -> None:
    """Set the switches that the environment does not set itself; child processes inherit them."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)
