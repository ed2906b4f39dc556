"""A function's name says where its code stands, whatever it is wrapped in, and its digest is that of its code."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from capture.record.callables import (
    describe_function,
    digest_function,
    digest_methods,
    find_own_code,
    name_class,
    name_function,
)
from tests.warm import warm_bin


def double(value: float, times: int = 2) -> float:
    return value * times


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


class Doubler:
    def __call__(self, value: float) -> float:
        return 2 * value

    def double(self, value: float) -> float:
        return 2 * value


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (double, "test_callables.py:double"),
        (functools.partial(double, 1), "test_callables.py:double"),
        (Doubler().double, "test_callables.py:Doubler.double"),
        (Doubler(), "test_callables.py:Doubler.__call__"),
        (F.silu, "torch.nn.functional:silu"),
        (F.scaled_dot_product_attention, "torch._C._nn:scaled_dot_product_attention"),
        (MethodType(LlamaMLP.forward, object()), "transformers.models.llama.modeling_llama:LlamaMLP.forward"),
    ],
)
def test_the_name_is_of_the_place_where_the_code_stands(function: Any, name: str) -> None:
    assert describe_function(function).name == name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps no qualified name in code")
def test_a_wrapper_is_not_called_by_the_name_that_it_took_over() -> None:
    assert name_function(wrap(double)) == "test_callables.py:wrap.<locals>.wrapper"


def test_a_class_is_named_by_its_package_or_its_file() -> None:
    assert name_class(nn.Linear) == "torch.nn.modules.linear:Linear"
    assert name_class(Doubler) == "test_callables.py:Doubler"


def test_the_jobs_own_code_is_found_in_what_libraries_put_around_it() -> None:
    in_autocast = torch.autocast("cpu", torch.bfloat16)(double)
    assert find_own_code(in_autocast) is double
    assert find_own_code(F.silu) is None


def test_equal_code_has_one_digest_and_other_code_another() -> None:
    def compile_function(text: str) -> Any:
        namespace: dict[str, Any] = {}
        exec(f"def function(value, times=2):\n    {text}", namespace)
        return namespace["function"]

    digests = [
        digest_function(compile_function(text))
        for text in (
            "return value * times",
            "return value + times",
            "return value * 2.0",
            "return value * 2",
            "return value.sin() * times",
            "return value.cos() * times",
            "return [part * times for part in value]",
            "return [part + times for part in value]",
        )
    ]
    assert len(set(digests)) == len(digests)
    assert digest_function(compile_function("return value * times")) == digests[0]


def test_defaults_and_what_is_wrapped_are_part_of_the_digest() -> None:
    def other(value: float, times: int = 3) -> float:
        return value * times

    assert digest_function(double) != digest_function(other)
    assert digest_function(wrap(double)) not in (digest_function(double), digest_function(wrap(other)))


def test_a_changed_method_changes_the_digest_of_the_methods_alone() -> None:
    def make_class(factor: int) -> type[nn.Module]:
        class Layer(nn.Module):
            def forward(self, value: Any) -> Any:
                return self.scale(value)

            def scale(self, value: Any) -> Any:
                return value * 2 if factor == 2 else value

        if factor == 3:
            Layer.scale = lambda self, value: value * 3  # type: ignore[method-assign]
        return Layer

    first, same, other = (make_class(factor) for factor in (2, 2, 3))
    assert digest_methods(first, nn.Module) == digest_methods(same, nn.Module) != digest_methods(other, nn.Module)
    assert digest_function(first.forward) == digest_function(other.forward)


def test_what_deepspeed_leaves_in_a_class_changes_no_digest() -> None:
    class Layer(LlamaMLP):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def scale(self, value: Any) -> Any:
            return value

    before = digest_methods(Layer, nn.Module)
    Layer._old_init = Layer.__init__
    Layer._apply = nn.Module._apply
    assert digest_methods(Layer, nn.Module) == before
    Layer.scale = lambda self, value: 2 * value  # type: ignore[method-assign]
    assert digest_methods(Layer, nn.Module) != before


@pytest.mark.slow
def test_another_process_has_the_same_digests() -> None:
    program = (
        "from transformers.models.llama.modeling_llama import LlamaMLP, LlamaForCausalLM as M, apply_rotary_pos_emb\n"
        "from capture.record.callables import digest_function as d, digest_methods as m\n"
        "from torch import nn\n"
        "print(d(LlamaMLP.forward), d(M.forward), d(apply_rotary_pos_emb), m(M, nn.Module))"
    )
    root = Path(__file__).parents[3]
    # The warm one has a hash seed of its own, and DeepSpeed and torch's compiler have been imported there.
    outputs = {
        subprocess.run(
            [python, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=1800,
            cwd=root,
            env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)},
        ).stdout
        for python in (sys.executable, str(warm_bin() / "python"))
    }
    assert len(outputs) == 1
