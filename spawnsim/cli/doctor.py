"""`spawnsim doctor`: print what this machine can run, and what to change, as `real.launch.doctor` finds it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from spawnsim.errors import SpawnsimError
from spawnsim.options import Parser
from spawnsim.real.launch.doctor import Finding, examine
from spawnsim.real.launch.launchers import detect_launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if something is lacking. Of several ranks the first one prints."""
    parser = Parser(prog="spawnsim doctor", description="Say what this machine can run, and what to change.")
    parser.add_argument("--json", action="store_true", help="print a JSON array of findings")
    as_json = parser.parse_args(argv).json
    if _is_another_rank():
        return 0
    findings = examine()
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(line for finding in findings for line in lines(finding)) + "\n")
    return int(any(finding.state == "lacking" for finding in findings))


def _is_another_rank() -> bool:
    """Whether a launcher has started more than one doctor, and this is not the first."""
    try:
        return detect_launcher().rank > 0
    except SpawnsimError:  # it is a finding
        return False


def lines(finding: Finding) -> list[str]:
    """Return a finding as text."""
    mark = {"good": "ok", "note": "--", "lacking": "!!"}[finding.state]
    text = [f"{mark} {finding.topic:20} {finding.found}"]
    return [*text, *([f"   {'':20} → {finding.advice}"] if finding.advice else [])]
