"""Read which parts of a model train, and which are in eval mode, where dropout does not act.

A part is named only where its flag is another one than that of the module around it: a model that trains whole has no
name, and an encoder in eval mode inside it has one, however many layers it has.
"""

import weakref
from collections.abc import Iterator

from torch import nn

from capture.file_format.optimizer_step import strip_wrappers
from capture.file_format.tensor_codec import TrainingMode
from capture.record.background_writer import warn

# The list of modules is made anew after so many passes: a job may put an adapter into its model.
_PASSES_FOR_A_LIST = 64
# What DDP, torch.compile, FSDP and PEFT call the module that they wrap.
_WRAPPED_NAMES = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model")


class TrainingModeReader:
    """Reads the flags of one model. It keeps no module alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._num_passes = 0
        self._latest: tuple[list[bool], TrainingMode] | None = None
        self._expected: TrainingMode | None = None
        self._has_failed = False

    def expect(self) -> TrainingMode | None:
        """Return what the flags are where a pass begins, by that of the model itself: those of its parts are kept.

        A device may stand idle while a pass begins. `correct` reads the flags of the parts where it ends.
        """
        model, latest = self._model(), self._latest
        if model is None or self._has_failed:
            return None
        is_known = latest is not None and latest[0][0] == model.training
        self._expected = latest[1] if latest is not None and is_known else self._read_safely(model)
        return self._expected

    def correct(self) -> TrainingMode | None:
        """Return what the flags are where a pass ends; None if that is what was expected, or nothing was."""
        model, expected, self._expected = self._model(), self._expected, None
        mode = None if model is None or expected is None or self._has_failed else self._read_safely(model)
        return None if mode == expected else mode

    def _read_safely(self, model: nn.Module) -> TrainingMode | None:
        """Read the flags. A failure is one warning, and the end of them."""
        try:
            return self._read(model)
        except Exception as error:
            self._has_failed = True
            warn(f"capture: which parts train is not kept from here on: {type(error).__name__}: {error}")
            return None

    def _read(self, model: nn.Module) -> TrainingMode:
        if self._num_passes % _PASSES_FOR_A_LIST == 0:
            self._modules = [weakref.ref(module) for module in model.modules()]
            self._latest = None
        self._num_passes += 1
        flags = [module.training for reference in self._modules if (module := reference()) is not None]
        # Naming the parts takes far longer than comparing flags, which hardly ever change.
        if self._latest is None or self._latest[0] != flags:
            self._latest = (flags, read_training_mode(model))
        return self._latest[1]


def read_training_mode(model: nn.Module) -> TrainingMode:
    """Read the flag of the model inside its wrappers, and name the parts whose flag is another one."""
    inner_model = _unwrap(model)
    return {"model": bool(inner_model.training), "parts": list(_list_modules_in_other_mode(inner_model, ""))}


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers: of one that wraps another, the flag alone says nothing."""
    children = dict(module.named_children())
    name = next(iter(children), "")
    is_wrapper = name in _WRAPPED_NAMES or (name == "model" and type(module).__module__.partition(".")[0] == "peft")
    return _unwrap(children[name]) if len(children) == 1 and is_wrapper else module


def _list_modules_in_other_mode(module: nn.Module, name: str) -> Iterator[str]:
    """Name the modules inside `module` whose flag is another one than that of the module around them."""
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        if child.training != module.training:
            yield strip_wrappers(full_name)
        yield from _list_modules_in_other_mode(child, full_name)
