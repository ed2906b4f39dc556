"""The form that a model is run in is read off its steps, and said in words."""

import pytest
import torch

from actor_init.model_form import DocumentBorders, HeadForm, Layout, LogitStep
from actor_init.option_values import CompileLengths, Head


def make_form(*steps: tuple[str, tuple[float, ...]], **values: object) -> HeadForm:
    return HeadForm(steps=tuple(LogitStep(function=name, numbers=numbers) for name, numbers in steps), **values)  # type: ignore[arg-type]


def test_a_soft_cap_is_found_whatever_dtype_it_is_computed_in() -> None:
    assert make_form().find_soft_cap() is None
    assert make_form(("float", ())).find_soft_cap() is None
    assert make_form(("div", (30.0,)), ("tanh", ()), ("mul", (30.0,))).find_soft_cap() == 30.0
    assert make_form(("float", ()), ("div", (7.0,)), ("tanh", ()), ("mul", (7.0,))).find_soft_cap() == 7.0


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([("div", (30.0,)), ("tanh", ()), ("mul", (20.0,))], "div 30, tanh, mul 20"),
        ([("mul", (30.0,)), ("tanh", ()), ("div", (30.0,))], "mul 30, tanh, div 30"),
        ([("div", (30.0,)), ("tanh", ())], "div 30, tanh"),
        ([("mul", (0.125,))], "mul 0.125"),
    ],
)
def test_other_steps_are_no_soft_cap_and_are_named(steps: list[tuple[str, tuple[float, ...]]], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        make_form(*steps).find_soft_cap()


def test_steps_are_applied_in_their_order_and_a_dtype_alone_changes_no_value() -> None:
    logits = torch.tensor([2.0, -3.0])
    form = make_form(("add", (1.0,)), ("mul", (2.0,)))
    assert form.apply_steps(logits).tolist() == [6.0, -4.0]
    assert form.changes_values
    assert not make_form(("float", ())).changes_values
    assert not make_form().changes_values
    assert make_form(("float", ()), ("mul", (2.0,))).changes_values


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (HeadForm(), "log-probs in chunks"),
        (make_form(("div", (4.0,)), why="--head chunks"), "log-probs in chunks, div 4 (--head chunks)"),
        (HeadForm(kind=Head.WHOLE, compiled=CompileLengths.STATIC), "whole logits, the loss compiled"),
        (HeadForm(kind=Head.LIGER, why="as the job"), "log-probs by Liger's fused loss (as the job)"),
        (Layout(packs=True), "packed"),
        (Layout(packs=True, borders=DocumentBorders.MASK), "packed, documents kept apart by a mask"),
        (Layout(packs=False), "padded"),
        (Layout(packs=False, as_captured=False, why_unusual="why"), "padded on the right, a document a row (why)"),
    ],
)
def test_forms_are_said_in_words(form: HeadForm | Layout, words: str) -> None:
    assert form.describe() == words
