"""Keep a record of each incident: what happened, in which forward, and which passes were written for it.

One recording of a rank has one file, `incidents_rank<rank>_<time>.json`. It holds no absolute path of the host and no
value of an environment variable whose name sounds like a secret.
"""

import json
import os
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any

from capture.black_box.collectives import count_collectives, find_last_collective
from capture.black_box.stacks import correct_phase, find_main_stack, format_all_stacks, parse_traceback
from capture.file_format.atomic_write import write_atomically
from capture.file_format.capture_file import FORMAT, utc_now
from capture.file_format.folder_layout import list_capture_folders, make_rank_folder
from capture.file_format.micro_batch import CaptureError
from capture.record.observer import Recording

MAX_INCIDENT_BYTES = 8 * 2**20
_MAX_TEXT = 20_000
_MAX_FRAMES = 60
_SECRET_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
# Shorter values are switches such as `1`, and would be found everywhere.
_MIN_SECRET_LENGTH = 6
_LOST_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote (process|peer)|ncclRemoteError|"
    r"peer .*(closed|disconnected)|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
_LIBRARY_FOLDER = re.compile(r"[^\s\"']*/(?:site|dist)-packages/")
# Files of the standard library keep `python3.11/` before their names, so that they are not taken for the job's.
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_CAPTURE_PARENT = str(Path(__file__).resolve().parents[2])
_ABSOLUTE_PATH = re.compile(r"(?<![\w./-])(?:/[\w.@+~%-]+)+/([\w.@+~%-]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """What made a recording write its passes.

    what            `exception`, `out of memory`, `not finite`, `signal`, `slow step` or `died`
    where           `forward`, `loss`, `SIGTERM`, ...
    forward         number of the forward that had begun last, or of the one whose numbers they are
    files           names of the files that were written for it
    num_not_copied  passes whose copy did not reach the host in time
    place           the phase in or after the pass `forward` that the rank was in (`TrainingPhase`); empty: not known
    last_backward   the pass whose loss was differentiated last; None: none was seen
    stacks          every thread's stack, as `capture.black_box.stacks` writes it
    collectives     how many collectives the rank had entered, by process group
    last_collective what torch's flight recorder of collectives had last, by group
    world_size      ranks of the job; None: not known
    opened          when the recording began
    last_moved      when the rank entered `place`, if its process was killed
    """

    what: str
    where: str
    forward: int | None
    time: str
    message: str = ""
    traceback: str = ""
    files: Sequence[str] = ()
    num_not_copied: int = 0
    place: str = ""
    last_backward: int | None = None
    stacks: str = ""
    collectives: Mapping[str, int] = field(default_factory=dict)
    last_collective: str = ""
    world_size: int | None = None
    opened: str = ""
    last_moved: str = ""

    @property
    def is_signal(self) -> bool:
        return self.what == "signal"

    @property
    def ends_job(self) -> bool:
        """Tell whether the process ends with it, unless the job goes on."""
        return self.what in ("exception", "out of memory") or (self.is_signal and self.where != "SIGUSR1")

    @property
    def follows_another(self) -> bool:
        """Tell whether it says no more than that another rank is gone."""
        return self.what == "exception" and _LOST_CONNECTION.search(self.message) is not None


def make_incident(what: str, where: str, forward: int | None, message: str = "") -> Incident:
    """Describe an incident that happens now; `message` is scrubbed of paths and secrets."""
    return Incident(what=what, where=where, forward=forward, time=utc_now(), message=scrub(message))


def describe_exception(error: BaseException, where: str, forward: int | None) -> Incident:
    """Describe an exception as texts alone: the exception itself holds its frames, and these the job's tensors."""
    is_out_of_memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error)
    lines = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES).format()
    what, message = "out of memory" if is_out_of_memory else "exception", f"{type(error).__name__}: {error}"
    return replace(make_incident(what, where, forward, message), traceback=scrub("".join(lines)))


def add_position(incident: Incident, recording: Recording) -> Incident:
    """Add to an incident that happens now where the rank is, what every thread does, and its last collectives."""
    stacks = scrub(format_all_stacks())
    frames = [*find_main_stack(stacks), *parse_traceback(incident.traceback)]
    position = recording.position
    return replace(
        incident,
        place=correct_phase(position.phase, frames),
        last_backward=position.last_backward if position.last_backward >= 0 else None,
        stacks=stacks,
        collectives=count_collectives(),
        last_collective=find_last_collective(),
        world_size=recording.world_size,
        opened=recording.opened,
    )


def is_first_report(listener_id: int, error: BaseException) -> bool:
    """Tell whether a listener gets this exception for the first time: on its way up it passes several hooks.

    The exception itself remembers its listeners, so that nothing else keeps it, and the tensors of its frames, alive.
    """
    reported_to: set[int] = error.__dict__.setdefault("_reported_by_capture", set())
    if listener_id in reported_to:
        return False
    reported_to.add(listener_id)
    return True


def scrub(text: str) -> str:
    """Return the end of `text` without values of secrets, folders of libraries and absolute paths."""
    text = text[-_MAX_TEXT:]
    for name, value in os.environ.items():
        if len(value) >= _MIN_SECRET_LENGTH and _SECRET_NAMES.search(name):
            text = text.replace(value, "***")
    text = text.replace(f"{_STANDARD_LIBRARY}/site-packages/", "").replace(f"{_STANDARD_LIBRARY}/dist-packages/", "")
    text = text.replace(f"{_STANDARD_LIBRARY}/", f"{Path(_STANDARD_LIBRARY).name}/")
    text = text.replace(f"{_CAPTURE_PARENT}/capture/", "capture/")
    return _ABSOLUTE_PATH.sub(r"\1", _LIBRARY_FOLDER.sub("", text))


def write_incidents(folder: Path, incidents: Sequence[Incident], *, num_others: int, rank: int, stamp: str) -> None:
    """Write or replace the record of one recording. `folder` is made if it is not there. Raises OSError.

    num_others  incidents after these, for which nothing was written
    """
    content = {
        "format": FORMAT,
        "rank": rank,
        "num_others": num_others,
        "incidents": [asdict(incident) for incident in incidents],
    }
    make_rank_folder(folder)
    write_atomically(folder / f"incidents_rank{rank}_{stamp}.json", json.dumps(content, indent=1).encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentRecord:
    """The incidents of one recording. `num_others` came after them, and nothing was written for these."""

    name: str
    rank: int
    num_others: int
    incidents: list[Incident] = field(default_factory=list)


def read_incidents(folder: Path) -> list[IncidentRecord]:
    """Read all records of a folder and of its ranks' folders, in the order of their first incidents.

    Raises CaptureError for a damaged one.
    """
    paths = [path for home in list_capture_folders(folder) for path in home.glob("incidents_rank*.json")]
    records = [_read_record(path) for path in sorted(paths)]
    return sorted(records, key=lambda record: min((incident.time for incident in record.incidents), default=""))


_FIELD_TYPES: dict[str, type | UnionType] = {
    "what": str,
    "where": str,
    "forward": int | None,
    "time": str,
    "message": str,
    "traceback": str,
    "files": list,
    "num_not_copied": int,
    "place": str,
    "last_backward": int | None,
    "stacks": str,
    "collectives": dict,
    "last_collective": str,
    "world_size": int | None,
    "opened": str,
    "last_moved": str,
}
assert _FIELD_TYPES.keys() == {field.name for field in fields(Incident)}


def _read_record(path: Path) -> IncidentRecord:
    try:
        with open(path, "rb") as file:
            content: Any = json.loads(file.read(MAX_INCIDENT_BYTES + 1)[:MAX_INCIDENT_BYTES])
    except (OSError, ValueError, RecursionError) as error:
        raise CaptureError(f"{path.name}: cannot be read: {error}. Delete the file or copy it again") from None
    incidents = _parse_incidents(content)
    if incidents is None:
        raise CaptureError(f"{path.name}: no incidents of format {FORMAT}. Delete the file or copy it again")
    return IncidentRecord(name=path.name, rank=content["rank"], num_others=content["num_others"], incidents=incidents)


def _parse_incidents(content: Any) -> list[Incident] | None:
    """Return the incidents of a record; None if it is no record."""
    match content:
        case {"format": format, "rank": int(), "num_others": int(), "incidents": list(all_values)} if format == FORMAT:
            pass
        case _:
            return None
    is_whole = all(
        isinstance(values, dict)
        and values.keys() == _FIELD_TYPES.keys()
        and all(isinstance(values[name], field_type) for name, field_type in _FIELD_TYPES.items())
        and all(isinstance(count, int) for count in values["collectives"].values())
        for values in all_values
    )
    return [Incident(**values) for values in all_values] if is_whole else None
