"""Tell which module's forward begins and ends, while one pass runs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers import PreTrainedModel

from actor_init.spec import Compile
from actor_init.tracing import traced_modules


@contextmanager
def told_of_modules(
    model: PreTrainedModel, compiled: Compile, begins: Callable[[str], None], ends: Callable[[str, Any], None]
) -> Iterator[None]:
    """Call `begins` with a module's name, and `ends` with its name and output, around each forward.

    Of the modules that a trace would tell apart; `ends` is called too where a forward raises.
    """

    def before(name: str) -> Callable[..., None]:
        return lambda *_: begins(name)

    def after(name: str) -> Callable[..., None]:
        return lambda _module, _arguments, output: ends(name, output)

    with ExitStack() as hooks:
        for name, module in traced_modules(model, compiled):
            hooks.callback(module.register_forward_pre_hook(before(name)).remove)
            hooks.callback(module.register_forward_hook(after(name), always_call=True).remove)
        yield
