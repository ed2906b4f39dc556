"""Map a model's parameters to the tensors of a checkpoint, as transformers does when it loads one.

Since release 5 transformers keeps a mixture's experts in one parameter, and fuses, splits or renames others; what it
saves has the names of before. Its own table of conversions (`conversion_mapping.py`) is used here for one parameter at
a time.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one parameter is made of a checkpoint's tensors.

    target     the first parameter that the conversion makes
    sources    for each tensor, the pattern that its name matched, and the name
    converter  transformers' WeightConverter; None: the single tensor is the parameter, unchanged
    model      on the meta device; some conversions read its config or shapes
    """

    target: str
    sources: tuple[tuple[str, str], ...]
    converter: Any
    model: PreTrainedModel | None

    @classmethod
    def from_unchanged_tensor(cls, name: str) -> "Recipe":
        """Return the recipe of a parameter that is a tensor of its own name."""
        return cls(target=name, sources=((name, name),), converter=None, model=None)

    def make(self, name: str, read: ReadTensor) -> Tensor:
        """Return the parameter `name`, whole. `read` returns a tensor of the checkpoint by its name."""
        if self.converter is None:
            ((_, source),) = self.sources
            return read(source)
        return self._convert(read)[name]

    def list_parameters(self, read: ReadTensor) -> list[str]:
        """Return all parameters that the conversion makes; `read` may return tensors on the meta device."""
        return [self.target] if self.converter is None else list(self._convert(read))

    def _convert(self, read: ReadTensor) -> dict[str, Tensor]:
        assert self.model is not None
        converter = deepcopy(self.converter)
        for pattern, source in self.sources:
            converter.add_tensor(self.target, source, pattern, read(source))
        result = converter.convert(self.target, model=self.model, config=self.model.config)
        # Before transformers 5.1 the result is a pair of the parameters and the errors.
        parameters = result[0] if isinstance(result, tuple) else result
        return {name: values[0] if isinstance(values, list) else values for name, values in parameters.items()}


def find_recipes(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Recipe]:
    """Return the recipe of each parameter and buffer of `model` that a checkpoint with tensors of `shapes` can fill.

    `model` may be on the meta device. Before transformers 5 each tensor has its parameter's name.
    """
    state = model.state_dict()
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    # transformers 4 has no conversions.
    except ImportError:
        return {name: Recipe.from_unchanged_tensor(name) for name in shapes.keys() & state.keys()}
    mapping = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, list[tuple[str, str]]] = {}
    converters_by_target: dict[str, Any] = {}
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            continue
        sources.setdefault(target, []).append((pattern or name, name))
        converters_by_target.setdefault(target, converter_of[pattern] if pattern is not None else None)

    def make_meta_tensor(name: str) -> Tensor:
        return torch.empty(shapes[name], device="meta")

    recipes: dict[str, Recipe] = {}
    for target, tensors in sources.items():
        recipe = Recipe(target=target, sources=tuple(tensors), converter=converters_by_target[target], model=model)
        recipes.update(dict.fromkeys(recipe.list_parameters(make_meta_tensor), recipe))
    return recipes
