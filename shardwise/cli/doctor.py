"""`shardwise doctor`."""

import json

from shardwise.launch import local
from shardwise.report import doctor as report


def doctor(as_json: bool) -> int:
    """Print what is here and what is missing; 1 where training cannot start."""
    found = report.findings(local.probe_facts(), local.torch_version(), local.versions())
    print(json.dumps(report.values(found)) if as_json else report.text(found))
    return 0 if all(one.ok for one in found) else 1
