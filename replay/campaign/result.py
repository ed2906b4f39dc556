"""The results of commands of many replays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from actor_init.as_json import to_json
from replay.campaign.campaign import Campaign
from replay.output.frames import make_frame

if TYPE_CHECKING:
    from replay.output.frames import DataFrame


class ResultStatus(StrEnum):
    """How far a command came that writes its result as it goes."""

    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignResult:
    """What a command of many replays comes to.

    folder     where the replays left their logs, which `replay.open` reads
    command    the command line that repeats it
    exit_code  that of the command line
    result     as `<command>.json` has it
    """

    folder: Path
    command: str
    exit_code: int
    result: Mapping[str, Any]

    @classmethod
    def from_campaign(cls, campaign: Campaign[Any], *, exit_code: int, **fields: Any) -> Self:
        """Return the result of a campaign that has ended, with the fields of the command's own."""
        return cls.from_parts(campaign.folder, campaign.command_line, campaign.result, exit_code=exit_code, **fields)

    @classmethod
    def from_parts(cls, folder: Path, command: str, result: Any, *, exit_code: int, **fields: Any) -> Self:
        """Return the result of whose file `result` is the content, with the fields of the command's own."""
        # Absolute, since the caller may change its working folder.
        return cls(folder=folder.absolute(), command=command, exit_code=exit_code, result=to_json(result), **fields)

    def to_dict(self) -> dict[str, Any]:
        """Return folder, command, exit code and result as JSON has them."""
        return {
            "folder": str(self.folder),
            "command": self.command,
            "exit_code": self.exit_code,
            "result": self.result,
        }

    def to_frame(self) -> "DataFrame":
        """Return a table with a row for each part of the result. Needs pandas."""
        return make_frame(self._list_rows())

    def _list_rows(self) -> Iterable[dict[str, Any]]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingResult(CampaignResult):
    """What a command comes to that runs in one world, and writes its file anew with each thing that it learns.

    status  `running` of one that broke off
    """

    status: ResultStatus
