"""Describe the recordings in a folder of captures, one by one."""

from collections.abc import Mapping
from dataclasses import dataclass

from capture.file_format.folder_recordings import FolderRecording
from capture.file_format.segment import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingFacts:
    """One recording in a folder.

    number     as `--recording` knows it, from 1
    began      ISO 8601; None: its captures do not say
    num_steps  of the job's optimizer, that were recorded with a pass
    num_hosts  None where its captures do not say on which hosts they were written, as files of one pass do not
    """

    number: int
    began: str | None
    ranks: list[int]
    num_passes: int
    num_steps: int
    num_files: int
    num_hosts: int | None


def describe_recording(recording: FolderRecording, steps_by_id: Mapping[str | None, set[int]]) -> RecordingFacts:
    """Describe a recording of a folder.

    steps_by_id  the numbers of the steps that were recorded, by the id of the captures' recording
    """
    hosts = [file.head.host for file in recording.files if isinstance(file, Segment)]
    return RecordingFacts(
        number=recording.number,
        began=recording.began,
        ranks=recording.ranks,
        num_passes=recording.num_passes,
        num_steps=len({step for id in recording.ids for step in steps_by_id.get(id, ())}),
        num_files=len(recording.files),
        num_hosts=len(set(hosts)) if len(hosts) == len(recording.files) else None,
    )
