"""Find the incident in which a pass of the job broke off, of passes of which nothing else was recorded."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from capture.black_box.incidents import Incident, read_incidents
from capture.file_format.micro_batch import CaptureError
from replay.report.text import one_line
from replay.verdict.judge import Pass

IN_FORWARD = "in forward"  # of `Incident.place`


def with_incidents(passes: Sequence[Pass], folder: Path) -> Sequence[Pass]:
    """Name the incident of each pass that has no number of the job's. The folder is looked at if there is one."""
    if all(recorded is None or recorded.claims for _, recorded, _ in passes):
        return passes
    try:
        records = read_incidents(folder)
    except (CaptureError, OSError):  # `replay inspect` names the file
        return passes
    ended = [one for record in records for one in record.incidents if one.place == IN_FORWARD and _ends(one)]
    found = {(name, one.forward): one for one in ended for name in one.files}
    return [
        Pass(record, replace(recorded, broke_off=_said(found[record.source, recorded.step])), replayed)
        if recorded is not None and not recorded.claims and (record.source, recorded.step) in found
        else Pass(record, recorded, replayed)
        for record, recorded, replayed in passes
    ]


def _ends(incident: Incident) -> bool:
    return incident.ends_job or incident.what == "died"


def _said(incident: Incident) -> str:
    is_error = incident.what in ("exception", "out of memory")
    how = one_line(incident.message) if is_error else f"{incident.what}, {incident.where}"
    return f"the job broke off in the forward of this pass: {how}"
