"""Notice that a job freezes parameters while it trains, or trains frozen ones, by a few flags at each pass."""

import weakref
from collections.abc import Mapping

from torch import nn

# So many modules are looked at in a pass, in turn: 20 microseconds. A model with more is seen whole in a few passes.
NUM_A_PASS = 64


class TrainedFlags:
    """Watches which parameters of some modules are trained. It keeps no module alive.

    modules  by name
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        with_parameters = {name: module for name, module in modules.items() if module._parameters}
        self._names = list(with_parameters)
        self._modules = [weakref.ref(module) for module in with_parameters.values()]
        self._flags = [_read_flags(module) for module in with_parameters.values()]
        self._step = -(-len(self._names) // NUM_A_PASS) or 1
        self._num_looks = 0

    def have_changed(self) -> bool:
        """Tell whether a parameter of those that are looked at in this pass is trained now and was not, or vice versa.

        After a change all of them are as they are now.
        """
        first = self._num_looks % self._step
        self._num_looks += 1
        # A device may stand idle meanwhile, so this is one loop without calls.
        for reference, flags in zip(self._modules[first :: self._step], self._flags[first :: self._step], strict=True):
            parameters = () if (module := reference()) is None else module._parameters.values()
            trained = [parameter.requires_grad for parameter in parameters if parameter is not None]
            if module is not None and trained != [is_trained for _, is_trained in flags]:
                break
        else:
            return False
        self._flags = [
            flags if (module := reference()) is None else _read_flags(module)
            for reference, flags in zip(self._modules, self._flags, strict=True)
        ]
        return True

    def list_frozen(self) -> list[str]:
        """List the parameters that were frozen when they were looked at last, by name."""
        return [
            f"{name}.{key}" if name else key
            for name, flags in zip(self._names, self._flags, strict=True)
            for key, is_trained in flags
            if not is_trained
        ]


def _read_flags(module: nn.Module) -> list[tuple[str, bool]]:
    return [(key, parameter.requires_grad) for key, parameter in module._parameters.items() if parameter is not None]
