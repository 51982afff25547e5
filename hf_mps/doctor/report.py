"""The doctor's findings for people and for programs."""

from __future__ import annotations

import json as jsons
from collections.abc import Mapping, Sequence

import hf_mps
from hf_mps.core.files import plain
from hf_mps.device import simulated
from hf_mps.doctor.finding import Finding
from hf_mps.doctor.trials import Trial

SIGNS = {"ok": " ", "note": "·", "problem": "!"}


def print_report(found: Mapping[str, Sequence[Finding]], trials: Sequence[Trial] | None = None, *, json: bool) -> None:
    """Print every section: a line a finding, and below what is not well the command or link that goes on.

    JSON has what each trial found as values too, beside the sentences.
    """
    if json:
        well = not any(each.state == "problem" for findings in found.values() for each in findings)
        told: dict[str, object] = {"hf_mps": hf_mps.__version__, "ready": well, "simulated": simulated()}
        told["findings"] = found
        if trials is not None:
            told["trials"] = trials
        print(jsons.dumps(plain(told), indent=2))
        return
    print(f"hf-mps {hf_mps.__version__} doctor")
    width = max(len(each.name) for findings in found.values() for each in findings)
    for section, findings in found.items():
        print(f"\n{section}")
        for each in findings:
            print(f"{SIGNS[each.state]} {each.name:<{width}}  {each.says}".rstrip())
            if each.next:
                print(f"  {'':<{width}}  next: {each.next}")
