"""Plan the runs of parity: for each dtype a reference, its equivalents, and the cells of the matrix.

The reference is one process under the matrix's reference backend, with nothing sharded, rows padded as transformers
pads them, sdpa attention (eager if the model has no sdpa), uncompiled. A cell of d data ranks that accumulates n
passes averages a gradient over d * n inputs, so its reference accumulates as many. Every cell is compared with the
reference of its own dtype: bf16 rounding would hide an error in fp32.

Besides the requested inputs, a built-in matrix runs the edge shapes that ship with the project, as groups of runs with
their own references and noise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from actor_init.declarations.backends import BACKENDS, DEFAULT, find_obstacle
from actor_init.spec import Attention, Compile, Dtype, UsageError
from capture import facts
from replay.agreement.matrix import DATA, REFERENCE, Setting, count_processes, name_of, to_options
from replay.options.option_parsing import build_replay_spec, format_error_with_flags, list_options
from replay.options.spec import ReplaySpec
from replay.processes.interpreter import Environment

PLAIN: Setting = {"backend": REFERENCE, "compile": Compile.OFF, "tp": 1, "ring": 1}
NOT_PLAIN = (
    *("zero_stage", "sequence_parallel", "tp_plan", "ring_head_stride", "gradient_checkpointing"),
    *("grad_accumulation", "deepspeed_config", "kernels"),
)
# Equivalents that run the reference's own configuration again.
REPEATS = ("the same again", "row order")
# Options that name a file with the settings of one library.
FILES = ("deepspeed_config",)
IN_NAMES = ("backend", "dtype", "packing", "attention", "compile", "tp", "ring", *NOT_PLAIN)


class Role(StrEnum):
    REFERENCE = "reference"
    # An equivalent differs from the reference by rounding alone, so it measures the noise.
    EQUIVALENT = "equivalent"
    CELL = "cell"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of the matrix."""

    name: str
    role: Role
    spec: ReplaySpec
    num_processes: int
    # Name of the cell that this one is compared with. The reference of a dtype names itself.
    reference: str
    # What an equivalent varies; empty for other cells.
    varies: str = ""
    # Cells of a group share references and noise. The group of the requested inputs has no name.
    group: str = ""
    # Path of the interpreter that runs the cell; empty for this one.
    python: str = ""

    @property
    def num_data_ranks(self) -> int:
        return self.num_processes // (self.spec.actor.parallel.tp * self.spec.actor.parallel.ring)

    @property
    def baseline(self) -> tuple[str, Dtype]:
        """The group and dtype. Runs with the same baseline share their reference and their noise."""
        return self.group, self.spec.actor.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixContext:
    """What this machine and these inputs allow."""

    # As torch names it: cuda or cpu.
    device: str
    num_devices: int
    num_inputs: int
    # The model's config, as transformers loads it.
    config: Any
    # Whether a captured row holds several documents, which padding cannot separate.
    must_pack: bool
    group: str = ""

    @property
    def kernel(self) -> str:
        """The attention kernel that every device supports for this model."""
        from actor_init.attention.kernel_choice import choose_plain_kernel

        return choose_plain_kernel(self.config)

    @property
    def has_user_model(self) -> bool:
        """Does a user's function build the model?"""
        return getattr(self.config, "model_type", None) == "custom"

    @property
    def only_values(self) -> Setting:
        """Return the only values that this model has of some options, where a setting does not say others."""
        return {"packing": False} if self.has_user_model else {}

    def plain_setting(self, dtype: Dtype) -> Setting:
        """Return the setting of the reference."""
        return {**PLAIN, "attention": self.kernel, "dtype": dtype, "packing": self.must_pack}

    def name_run(self, setting: Setting, suffix: str = "") -> str:
        return (f"{self.group}: " if self.group else "") + name_of(setting) + (f", {suffix}" if suffix else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityPlan:
    """The runs in order (references, equivalents, cells), and the cells that cannot run, with the reason.

    environments  that the runs are of; none: this one alone
    """

    cells: list[Cell]
    refused: dict[str, str]
    environments: list[Environment] = field(default_factory=list)


def plan_matrix(
    settings: Sequence[Setting],
    common: Mapping[str, Any],
    context: MatrixContext,
    arrange: Callable[[Sequence[Setting]], Sequence[Setting]] = lambda settings: settings,
) -> ParityPlan:
    """Plan the runs of a matrix.

    Each setting that agrees with the typed options becomes a cell, or is refused with the reason. The cells are then
    arranged. Each dtype among them gets a reference, equivalents, and a reference for each number of accumulated
    inputs. References come first, since the other runs are compared with them.

    common   typed options by parameter name; of an axis of the matrix they select cells, others hold for every cell
    arrange  orders the settings that can run, or selects among them

    Raises UsageError if no setting can run.
    """
    typed_spec = build_replay_spec(common)
    typed_values = {
        option.field: option.read_value(typed_spec)
        for option in list_options()
        if option.part.startswith("actor") and common.get(option.parameter) is not None
    }
    refused: dict[str, str] = {}
    cells: dict[Any, Cell] = {}
    keys: dict[int, Any] = {}
    for setting in settings:
        if any(str(setting[field]) != str(value) for field, value in typed_values.items() if field in setting):
            continue
        backend = setting.get("backend", typed_spec.actor.backend)
        own_values = {
            field: value for field, value in typed_values.items() if field in IN_NAMES and _applies_to(field, backend)
        }
        whole_setting = own_values | dict(setting)
        before = len(cells)
        _admit_cell(cells, refused, context, Role.CELL, whole_setting, common)
        if len(cells) > before:
            keys[id(setting)] = next(reversed(cells))
    if not cells:
        reason = next(iter(refused.values()), "the options leave no cell. Try: fewer of them")
        raise UsageError(f"no cell of the matrix can run here: {reason}")
    order = [keys[id(setting)] for setting in arrange([setting for setting in settings if id(setting) in keys])]
    cells = {key: cells[key] for key in order}
    all_cells: dict[Any, Cell] = {}
    for dtype in dict.fromkeys(cell.spec.actor.dtype for cell in cells.values()):
        windows = {_count_window_inputs(cell) for cell in cells.values() if cell.spec.actor.dtype is dtype}
        _add_baseline(all_cells, refused, context, dtype, sorted(windows - {1}), common)
    names = {cell.name for cell in all_cells.values()}
    for lacking in (cell.reference for cell in cells.values() if cell.reference not in names):
        raise UsageError(f"{lacking}, which others would be compared with, cannot run: {refused[lacking]}")
    for key, cell in cells.items():
        all_cells.setdefault(key, cell)
    return ParityPlan(
        cells=sorted(all_cells.values(), key=lambda cell: cell.role is not Role.REFERENCE), refused=refused
    )


def merge_plans(plans: Sequence[ParityPlan]) -> ParityPlan:
    """Merge plans into one, references first."""
    cells = [cell for plan in plans for cell in plan.cells]
    refused = {name: reason for plan in plans for name, reason in plan.refused.items()}
    return ParityPlan(cells=sorted(cells, key=lambda cell: cell.role is not Role.REFERENCE), refused=refused)


def repeat_in_environments(plan: ParityPlan, environments: Sequence[Environment]) -> ParityPlan:
    """Plan the runs for the first environment, and for each other one again all but those that repeat a reference.

    The noise is the first environment's, and so are the references that the others' runs are compared with. A run that
    both can make has the name of the first's and, behind it, the versions that differ.
    """
    first, *other_environments = environments
    cells = [replace(cell, python=first.python) for cell in plan.cells]
    for number, other in enumerate(other_environments, start=2):
        suffix = f"env {number}: {other.describe_differences(first) or 'the same versions'}"
        cells += [
            replace(
                cell,
                name=f"{cell.name}, {suffix}",
                role=Role.CELL,
                reference=cell.name if cell.role is Role.REFERENCE else cell.reference,
                python=other.python,
            )
            for cell in plan.cells
            if cell.varies not in REPEATS
        ]
    return replace(plan, cells=cells, environments=list(environments))


def _count_window_inputs(cell: Cell) -> int:
    """Return the number of inputs that one gradient is averaged over."""
    return cell.num_data_ranks * cell.spec.actor.resolved_grad_accumulation


def _add_baseline(
    cells: dict[Any, Cell],
    refused: dict[str, str],
    context: MatrixContext,
    dtype: Dtype,
    windows: Sequence[int],
    common: Mapping[str, Any],
) -> None:
    """Add the reference of a dtype, its equivalents, and the references of cells that average over `windows` inputs."""
    plain = context.plain_setting(dtype)
    shared = {name: value for name, value in common.items() if _find_field(name) not in NOT_PLAIN}
    admit = partial(_admit_cell, cells, refused, context, common=shared)
    admit(Role.REFERENCE, plain)
    admit(Role.EQUIVALENT, plain, varies=REPEATS[0], suffix="again")
    admit(Role.EQUIVALENT, plain, varies=REPEATS[1], suffix="rows reversed")
    kernels = () if context.has_user_model else (Attention.EAGER, Attention.FLASH)
    for kernel in (name for name in kernels if name != context.kernel):
        # eager keeps the scores of all token pairs for backward; with checkpointing only one block's at a time
        eager = {"gradient_checkpointing": True} if kernel == Attention.EAGER else {}
        admit(Role.EQUIVALENT, {**plain, "attention": kernel, **eager}, varies="kernel")
    # A user's model has one kernel. Compiled, its sums are rounded in other places.
    if context.has_user_model:
        admit(Role.EQUIVALENT, {**plain, "compile": Compile.BLOCKS}, varies="kernel")
    elif not context.must_pack:
        admit(Role.EQUIVALENT, {**plain, "packing": True}, varies="reduction order")
    if not context.has_user_model:
        admit(Role.EQUIVALENT, {**plain, "tp": 2}, varies="tp")
    for window in windows:
        extra = {"grad_accumulation": str(window)}
        admit(Role.REFERENCE, plain, suffix=f"accumulated {window}", extra=extra)


def _admit_cell(
    cells: dict[Any, Cell],
    refused: dict[str, str],
    context: MatrixContext,
    role: Role,
    setting: Setting,
    common: Mapping[str, Any],
    varies: str = "",
    suffix: str = "",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Add a cell to `cells` if it is new and can run here, else to `refused` with the reason."""
    setting = {**context.only_values, **setting}
    name = context.name_run(setting, suffix)
    try:
        spec = _build_spec(setting, context, common, extra or {}, reverses=varies == REPEATS[1])
        _check_runnable(spec, count_processes(setting), context)
        key = (*_find_run_key(spec, count_processes(setting), context), suffix == "again")
    except UsageError as error:
        refused[name] = format_error_with_flags(error)
        return
    plain = context.name_run(context.plain_setting(spec.actor.dtype))
    window = setting.get(DATA, 1) * spec.actor.resolved_grad_accumulation
    reference = plain if window == 1 or role is Role.REFERENCE else f"{plain}, accumulated {window}"
    if spec.measure.steps and role is Role.REFERENCE:
        # Steps on other windows are a different training run.
        reference = name
    cell = Cell(
        name=name,
        role=role,
        spec=spec,
        num_processes=count_processes(setting),
        reference=reference,
        varies=varies,
        group=context.group,
    )
    cells.setdefault(key, cell)


def _build_spec(
    setting: Setting, context: MatrixContext, common: Mapping[str, Any], extra: Mapping[str, Any], *, reverses: bool
) -> ReplaySpec:
    """Return the settled spec of a setting's run. Raises UsageError for one that is not allowed, or has no inputs."""
    num_data_ranks = setting.get(DATA, 1)
    backend = setting.get("backend", common.get("backend", DEFAULT))
    shared = {
        parameter: value
        for parameter, value in common.items()
        if _find_field(parameter) not in setting and _applies_to(_find_field(parameter), backend)
    }
    own_options = {"grad_accumulation": "1", **to_options(setting), **extra}
    num_each = context.num_inputs // num_data_ranks
    if num_each < 1:
        raise UsageError(f"{num_data_ranks} data ranks need as many inputs, and there are {context.num_inputs}")
    if num_each < int(own_options["grad_accumulation"]):
        raise UsageError(
            f"{num_data_ranks} data ranks that accumulate {own_options['grad_accumulation']} passes "
            f"need as many inputs each, and there are {context.num_inputs}"
        )
    always = {"shuffle_inputs": True, "max_inputs": str(num_each), "quiet": True}
    spec = build_replay_spec({**shared, **own_options, **always})
    return replace(
        spec,
        actor=spec.actor.with_defaults(),
        inputs=replace(spec.inputs, reverse_rows=reverses),
        measure=replace(spec.measure, details=True),
    )


def _applies_to(field: str, backend: str) -> bool:
    """Does an option that was typed for all runs apply to those of `backend`?

    A file with one library's settings applies to the backends that accept it. Any other option that a backend lacks is
    given to its runs too, and those are refused.
    """
    return field not in FILES or backend not in BACKENDS or field in BACKENDS[backend].exclusive_options


def _find_field(parameter: str) -> str:
    return next(option.field for option in list_options() if option.parameter == parameter)


def _check_runnable(spec: ReplaySpec, num_processes: int, context: MatrixContext) -> None:
    """Raise UsageError for a run that is known to be refused, so that no process is started for it."""
    from actor_init.parallel.tensor_parallel import check_divisible
    from actor_init.probe.layout_choice import explain_not_packed

    if num_processes > context.num_devices:
        devices = "GPUs" if context.device == "cuda" else "processes"
        raise UsageError(
            f"needs {num_processes} {devices}, and there are {context.num_devices}. See {facts.Setting('processes')}"
        )
    if context.must_pack and not spec.actor.packs:
        raise UsageError("captured rows hold several documents, which padded rows cannot keep apart")
    if spec.actor.packs and (why := explain_not_packed(context.config)):
        raise UsageError(f"{why}. Try: {facts.Setting('packing', False)}")
    check_divisible(context.config, spec.actor.parallel.tp)
    if complaint := find_obstacle(spec.actor, context.device):
        raise UsageError(complaint)


def _find_run_key(spec: ReplaySpec, num_processes: int, context: MatrixContext) -> tuple[Any, ...]:
    """Return a key that is equal for cells that are the same run. Raises UsageError if its kernels are not here."""
    import torch

    from actor_init.attention.kernel_choice import choose_kernel_name
    from actor_init.fused.liger import check_liger

    check_liger(spec.actor.kernels, torch.device(context.device))
    other_fields = replace(spec, actor=replace(spec.actor, attention=Attention.AUTO, zero_stage=None))
    kernel = choose_kernel_name(spec.actor, torch.device(context.device), context.config)
    return kernel, spec.actor.resolved_zero_stage, other_fields, num_processes
