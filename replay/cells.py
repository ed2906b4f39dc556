"""What parity runs: for each dtype a reference, runs that should equal it but for rounding, and the matrix's cells.

The reference is one process under fsdp2, which is torch's own autograd with nothing split, each row apart as
transformers pads it, through sdpa, uncompiled. A cell of d data ranks averages a gradient over d inputs, so it has a
reference that accumulates d passes. Every cell of a dtype is held against the reference of that dtype: what bf16
rounds away would hide an error in fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

from actor_init.spec import Attention, BackendName, Compile, Dtype, UsageError
from replay.matrix import DATA, Setting, name_of, num_processes_of, typed
from replay.options import run_spec, toggles
from replay.spec import RunSpec

PLAIN: Setting = {"backend": BackendName.FSDP2, "attention": Attention.SDPA, "compile": Compile.OFF, "tp": 1, "ring": 1}
NOT_PLAIN = ("zero_stage", "sequence_parallel", "tp_plan", "ring_head_stride", "gradient_checkpointing")
IN_NAMES = ("backend", "dtype", "packing", "attention", "compile", "tp", "ring", *NOT_PLAIN)


class Role(StrEnum):
    REFERENCE = "reference"
    EQUIVALENT = "equivalent"  # its difference from the reference is rounding alone: this is the noise
    CELL = "cell"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the matrix."""

    name: str
    role: Role
    spec: RunSpec
    num_processes: int
    reference: str  # the name of the cell that it is held against; its own for a reference of the dtype
    varies: str = ""  # of an equivalent: what

    @property
    def num_data_ranks(self) -> int:
        return self.num_processes // (self.spec.actor.parallel.tp * self.spec.actor.parallel.ring)


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """What this machine and these inputs allow."""

    device: str  # torch's type: cuda, cpu
    num_devices: int
    num_inputs: int
    config: Any  # of the model, as transformers has it
    must_pack: bool  # a captured row holds several documents, which padded rows cannot keep apart


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is run, in this order: references, equivalents, cells; and what cannot run, with the reason."""

    cells: list[Cell]
    refused: dict[str, str]


def plan(
    settings: Sequence[Setting],
    common: Mapping[str, Any],
    here: Here,
    arrange: Callable[[Sequence[Setting]], Sequence[Setting]] = lambda settings: settings,
) -> Plan:
    """`common` is what was typed, by parameter name: of an axis the one value that is wanted, else for every cell.

    `arrange` orders the settings that can run, or chooses among them. Raises UsageError where none can.
    """
    asked = run_spec(common)
    wanted = {
        toggle.field: toggle.value_in(asked)
        for toggle in toggles()
        if toggle.part.startswith("actor") and common.get(toggle.parameter) is not None
    }
    refused: dict[str, str] = {}
    cells: dict[Any, Cell] = {}
    keys: dict[int, Any] = {}
    for setting in settings:
        if any(str(setting[field]) != str(value) for field, value in wanted.items() if field in setting):
            continue
        named = {field: value for field, value in wanted.items() if field in IN_NAMES} | dict(setting)
        before = len(cells)
        _admit(cells, refused, here, Role.CELL, named, common)
        if len(cells) > before:
            keys[id(setting)] = next(reversed(cells))
    if not cells:
        reason = next(iter(refused.values()), "the options leave no cell. Try: fewer of them")
        raise UsageError(f"no cell of the matrix can run here: {reason}")
    order = [keys[id(one)] for one in arrange([one for one in settings if id(one) in keys])]
    cells = {key: cells[key] for key in order}
    ground: dict[Any, Cell] = {}
    for dtype in dict.fromkeys(cell.spec.actor.dtype for cell in cells.values()):
        windows = {cell.num_data_ranks for cell in cells.values() if cell.spec.actor.dtype is dtype}
        _add_ground(ground, refused, here, dtype, sorted(windows - {1}), common)
    names = {cell.name for cell in ground.values()}
    for lacking in (cell.reference for cell in cells.values() if cell.reference not in names):
        raise UsageError(f"{lacking}, which others would be held against, cannot run: {refused[lacking]}")
    for key, cell in cells.items():
        ground.setdefault(key, cell)
    return Plan(cells=sorted(ground.values(), key=lambda cell: cell.role is not Role.REFERENCE), refused=refused)


def _add_ground(
    cells: dict[Any, Cell],
    refused: dict[str, str],
    here: Here,
    dtype: Dtype,
    windows: Sequence[int],
    common: Mapping[str, Any],
) -> None:
    """The reference of a dtype, its equivalents, and the references of cells that average over `windows` inputs."""
    plain = {**PLAIN, "dtype": dtype, "packing": here.must_pack}
    shared = {name: value for name, value in common.items() if _field_of(name) not in NOT_PLAIN}
    admit = partial(_admit, cells, refused, here, common=shared)
    admit(Role.REFERENCE, plain)
    admit(Role.EQUIVALENT, plain, varies="the same again", suffix="again")
    admit(Role.EQUIVALENT, plain, varies="row order", suffix="rows reversed", more={"reverse_rows": True})
    for kernel in (Attention.EAGER, Attention.FLASH):
        # eager keeps every token pair's score for backward; a block's at a time is what fits
        eager = {"gradient_checkpointing": True} if kernel is Attention.EAGER else {}
        admit(Role.EQUIVALENT, {**plain, "attention": kernel, **eager}, varies="kernel")
    if not here.must_pack:
        admit(Role.EQUIVALENT, {**plain, "packing": True}, varies="reduction order")
    admit(Role.EQUIVALENT, {**plain, "tp": 2}, varies="tp")
    for window in windows:
        more = {"grad_accumulation": str(window)}
        admit(Role.REFERENCE, plain, suffix=f"accumulated {window}", more=more)


def _admit(
    cells: dict[Any, Cell],
    refused: dict[str, str],
    here: Here,
    role: Role,
    setting: Setting,
    common: Mapping[str, Any],
    varies: str = "",
    suffix: str = "",
    more: Mapping[str, Any] | None = None,
) -> None:
    """Into `cells` if it is new and can run here, else into `refused` with the reason."""
    name = name_of(setting) + (f", {suffix}" if suffix else "")
    num_data_ranks = setting.get(DATA, 1)
    shared = {parameter: value for parameter, value in common.items() if _field_of(parameter) not in setting}
    try:
        own = typed(setting) | dict(more or {})
        num_each = here.num_inputs // num_data_ranks
        if num_each < 1:
            raise UsageError(f"{num_data_ranks} data ranks need as many inputs, and there are {here.num_inputs}")
        always = {"shuffle_inputs": True, "max_inputs": str(num_each), "quiet": True}
        spec = run_spec({**shared, **own, **always})
        _check(spec, num_processes_of(setting), here)
        key = (*_key(spec, num_processes_of(setting), here), suffix == "again")
    except UsageError as error:
        refused[name] = str(error)
        return
    plain = name_of({**PLAIN, "dtype": spec.actor.dtype, "packing": here.must_pack})
    reference = plain if num_data_ranks == 1 else f"{plain}, accumulated {num_data_ranks}"
    if spec.measure.step and role is Role.REFERENCE:
        reference = name  # steps on other windows are another training
    cell = Cell(
        name=name,
        role=role,
        spec=spec,
        num_processes=num_processes_of(setting),
        reference=reference,
        varies=varies,
    )
    cells.setdefault(key, cell)


def _field_of(parameter: str) -> str:
    return next(toggle.field for toggle in toggles() if toggle.parameter == parameter)


def _check(spec: RunSpec, num_processes: int, here: Here) -> None:
    """Raises UsageError for what is known to be refused, so that no process is started for it."""
    from actor_init.tensor_parallel import check_divisible

    if num_processes > here.num_devices:
        what = "GPUs" if here.device == "cuda" else "processes"
        raise UsageError(f"needs {num_processes} {what}, and there are {here.num_devices}. See --num-devices")
    if here.must_pack and not spec.actor.packing:
        raise UsageError("captured rows hold several documents, which padded rows cannot keep apart")
    check_divisible(here.config, spec.actor.parallel.tp)


def _key(spec: RunSpec, num_processes: int, here: Here) -> tuple[Any, ...]:
    """Equal for cells that are the same run, however they were asked for. Raises UsageError if no kernel serves it."""
    import torch

    from actor_init.attention import kernel_name

    rest = replace(spec, actor=replace(spec.actor, attention=Attention.AUTO, zero_stage=None))
    return kernel_name(spec.actor, torch.device(here.device)), spec.actor.resolved_zero_stage, rest, num_processes
