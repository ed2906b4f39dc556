"""Declare what an objective of --loss is, as plain data without heavy imports, for checks and help."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveDeclaration:
    """An objective's word for --loss, where its formula is, and which options it takes.

    formula      "module:name" of its `Formula`, which is imported only when a replay computes it
    help         of the objective, for --loss
    own_options  fields of ObjectiveSpec that only objectives listing them take
    needs        names of tensors of which each pass has to have one, whatever the options
    """

    name: str
    formula: str
    help: str
    own_options: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()
