"""Decide in which passes a model's facts are taken."""

import weakref
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from capture.file_format.name_patterns import format_patterns
from capture.record.background_writer import warn
from capture.record.job_facts import read_config
from capture.record.model_facts import RawModelFacts, collect_model_facts, split_wrappers
from capture.record.trained_flags import TrainedFlags

# A job that freezes other parameters again and again is followed so many times.
MAX_CHANGES = 16


class ModelFactsTaker:
    """Takes the facts of a model in the first pass that it is asked for, and in the first one that trains.

    After that it takes them again where other parameters are trained than before: where a pass ends, since a device may
    stand idle while it begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._first_config: Mapping[str, object] = read_config(model)
        self._has_taken = False
        self._is_done = False
        # Of the pass that trains, as far as what is trained may still change.
        self._latest: RawModelFacts | None = None
        self._flags: TrainedFlags | None = None
        self._frozen: list[str] = []

    def take(self, *, forward: int, trains: bool) -> RawModelFacts | None:
        """Take the facts before the pass `forward`; None where they are known.

        A failure is one warning, and the end of facts; the pass is still recorded.
        """
        model = self._model()
        if model is None or self._is_done or (self._has_taken and not trains):
            return None
        self._is_done, self._has_taken = trains, True
        try:
            config = read_config(model)
            missing = object()
            changed = {key: value for key, value in config.items() if self._first_config.get(key, missing) != value}
            facts = collect_model_facts(model, forward=forward, trains=trains, config=changed)
            if trains:
                self._latest, self._flags = facts, TrainedFlags(split_wrappers(model)[1])
                self._frozen = self._flags.list_frozen()
            return facts
        except Exception as error:
            self._is_done = True
            warn(f"capture: what the model is will not be kept: {type(error).__name__}: {error}")
            return None

    def take_change(self, forward: int) -> RawModelFacts | None:
        """Take the facts again, where the pass `forward`, which trains, ends, if it trained other parameters."""
        if self._flags is None or self._latest is None or not self._flags.have_changed():
            return None
        frozen = self._flags.list_frozen()
        if frozen == self._frozen:
            # FSDP1 has other objects in the place of parameters for a time.
            return None
        self._frozen = frozen
        later: dict[str, list[str]] = dict(self._latest.rest["frozen_later"])
        later[str(forward)] = format_patterns(frozen, self._latest.parameters)
        facts = replace(self._latest, rest={**self._latest.rest, "frozen_later": later})
        self._latest = facts if len(later) < MAX_CHANGES else None
        return facts
