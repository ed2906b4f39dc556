"""Open a recording of a job's model, with its black box.

    with recording(model, "inputs/my-run"):
        train(model)

The job pays for copying a forward's arguments to the host, with `reproduce` also for samples of its weights and
gradients, and for nothing else. No exception of the recorder reaches the job.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from capture.black_box.black_box import BlackBox
from capture.record.call_arguments import check_argument_names
from capture.record.recorder import Recorder
from capture.record.retention import Passes, WhichEnd, check_retention


def recording(
    model: nn.Module,
    folder: str | Path,
    *,
    every: int = 1,
    forwards: str | range | tuple[int, int] | None = None,
    ranks: str | int | Iterable[int] | None = None,
    passes: Passes = "all",
    max_files: int | None = None,
    max_bytes: str | int | None = None,
    keep: WhichEnd = "first",
    flight_recorder: int | None = None,
    slow_step: float | str | None = None,
    reproduce: bool | None = None,
    segment: str | int | None = None,
    routes: bool = True,
    max_queued: int = 64,
    arguments: Mapping[str, str] | None = None,
    **unknown: NoReturn,
) -> Recorder:
    """Write the forwards of `model` until the recorder is closed or the process ends.

    model       what the job calls: the bare model or its wrapper (DDP, DeepSpeed's engine, torch.compile's)
    folder      made if it is not there, with mode 0700; several ranks share it
    every       every Nth forward, of those that `forwards`, `ranks` and `passes` allow; not every Nth optimizer step
    forwards    numbers of forwards, as `100:200` (without 200), a range or a pair; `100:` has no end
    ranks       ranks that record, as `0,3` or numbers
    passes      `train` (autograd on), `rollout` (autograd off) or `all`
    max_files, max_bytes   for each rank by itself, and for all its files in the folder, also of earlier recordings;
                1 KiB a file is set aside for the manifest
    keep        what a full folder does: `first` takes no more, `last` deletes its oldest files, or segments
    flight_recorder  the last N passes stay in memory, and only an incident writes them: an exception, a loss or
                gradient norm that is not finite, out of memory, SIGTERM, SIGINT, SIGQUIT, SIGUSR1 (the job goes on),
                a slow step
    slow_step   a step, from one forward to the next, of more than this many times the median is an incident; as `60s`,
                one of more than 60 seconds, also before there is a median
    reproduce   keep what it takes to do a pass again and to judge it: random states (10 kB), outputs, environment,
                samples of the weights (1 kB, the first pass more), and of gradients at each step of the optimizer. By
                default on with a flight recorder. A pass is then complete, and without a flight recorder written,
                when the next one begins
    segment     put many passes into one file of about this size, as `64MB` or a number of bytes, in a folder for each
                rank. Without it each pass is a file, and a rank has a folder of its own if there are more than 16
    routes      with `reproduce`, keep which experts a mixture of experts chose for each token, a byte or two for each
                token, layer and chosen expert: a replay then computes with the same experts
    max_queued  passes that may wait for the disk; further ones are dropped and counted
    arguments   names of the forward's arguments to those that a capture gives them, for a model whose forward has names
                of its own: `{"idx": "input_ids", "targets": "labels"}`. `labels` are those of transformers, which
                shifts them itself; targets that are the next tokens already are `shift_labels`

    Raises TypeError or ValueError for arguments of the wrong kind. A failure with the folder, then or later, is one
    warning, and the recorder's `failure` is the exception.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recording needs a torch.nn.Module, not {type(model).__name__}")
    if max_queued < 1:
        raise ValueError(f"max_queued must be 1 or more, not {max_queued}")
    retention = check_retention(
        every=every,
        forwards=forwards,
        ranks=ranks,
        passes=passes,
        max_files=max_files,
        max_bytes=max_bytes,
        keep=keep,
        flight_recorder=flight_recorder,
        slow_step=slow_step,
        reproduce=reproduce,
        segment=segment,
        routes=routes,
        **unknown,
    )
    names = check_argument_names(arguments)
    path = Path(folder).absolute()
    black_box = BlackBox(path, retention)
    return Recorder(model, path, retention=retention, max_queued=max_queued, names=names, observer=black_box)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check settings of a recording that begins later. Raises TypeError or ValueError."""
    check_argument_names(settings.get("arguments"))
    check_retention(**{name: value for name, value in settings.items() if name not in ("max_queued", "arguments")})
