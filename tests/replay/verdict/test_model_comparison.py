"""Two models are held against each other by what they are: what differs is named, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from capture.file_format.model_facts import ModelFacts
from capture.file_format.optimizer_step import OptimizerStep
from replay.verdict.model_comparison import OwnModel, OwnParameter, compare_models, find_unreduced_step_differences
from replay.verdict.model_facts import ALL_PARAMETERS, ALL_ZEROS, ModelDifference, ModelDifferenceKind
from replay.verdict.recorded_pass import RecordedPass, WeightComparison

LLAMA = "transformers.models.llama.modeling_llama"
NUM_LAYERS = 3
OWN_FORWARD = ["train.py:forward", "f0"]


def make_modules(patterns: bool) -> dict[str, Mapping[str, Any]]:
    layers: list[Any] = ["*"] if patterns else list(range(NUM_LAYERS))
    attention = {
        "class": f"{LLAMA}:LlamaAttention",
        "code": "a0",
        "methods": "a1",
        "attributes": {"scaling": 0.5, "layer_idx": "*"},
    }
    return {
        "": {"class": f"{LLAMA}:LlamaForCausalLM", "code": "m0", "methods": "m1"},
        **{f"model.layers.{layer}.self_attn": attention for layer in layers},
        **{f"model.layers.{layer}.mlp": {"class": f"{LLAMA}:LlamaMLP", "code": "l0"} for layer in layers},
        "lm_head": {"class": "torch.nn.modules.linear:Linear", "code": "h0"},
    }


def make_parameters(patterns: bool) -> dict[str, Mapping[str, Any]]:
    layers: list[Any] = ["*"] if patterns else list(range(NUM_LAYERS))
    names = ["embed.weight", *(f"model.layers.{layer}.mlp.weight" for layer in layers), "lm_head.weight"]
    return {name: {"dtype": "float32", "trained": True} for name in names}


def make_facts(*, patterns: bool) -> ModelFacts:
    frequencies = {"dtype": "float32", "num_elements": 2, "values": [1.0, 0.01], "norm": 1.00005}
    return ModelFacts(
        rank=0,
        recording="2026-01-01",
        forward=0,
        trains=True,
        python="cpython-311",
        versions={"torch": "2.13.0+cpu", "transformers": "5.23.0"},
        modules=make_modules(patterns),
        parameters=make_parameters(patterns),
        buffers={"rotary.inv_freq": frequencies},
        functions={LLAMA: {"apply_rotary_pos_emb": ["", "r0"]}},
        loss_function=["transformers.loss.loss_utils:ForCausalLMLoss", "c0"],
        attention={"name": "sdpa", "function": ["transformers.integrations.sdpa_attention:sdpa", "s0"], "mask": None},
    )


JOB, REPLAY = make_facts(patterns=True), make_facts(patterns=False)


def change(facts: ModelFacts, table: str, **rows: Mapping[str, Any] | None) -> ModelFacts:
    """Change rows of a table, whose names have `/` for `.`; None removes one."""
    values = dict(getattr(facts, table))
    for name, row in rows.items():
        key = name.replace("/", ".")
        if row is None:
            del values[key]
        else:
            values[key] = {**values.get(key, {}), **row}
    changed: Any = {table: values}
    return replace(facts, **changed)


def say(
    *job: ModelFacts, own: ModelFacts = REPLAY, parameters: Mapping[str, OwnParameter] | None = None
) -> list[tuple[str, str, str, str | None, str | None]]:
    differences = compare_models(job, OwnModel(facts=own, parameters=parameters or {}))
    return [(str(found.kind), found.where, found.key, found.job, found.replay) for found in differences]


def test_equal_models_do_not_differ() -> None:
    assert say(JOB) == []


def test_the_layers_that_differ_are_one_difference() -> None:
    other = {**JOB.modules["model.layers.*.self_attn"], "attributes": {"scaling": 0.125}}
    names = ("model.layers.[0-1].self_attn", "model.layers.2.self_attn", "model.layers.*.self_attn")
    modules = {name: values for name, values in JOB.modules.items() if name != names[2]}
    in_some = replace(JOB, modules={**modules, names[0]: other, names[1]: JOB.modules[names[2]]})
    assert say(in_some) == [("attribute", names[0], "scaling", "0.125", "0.5")]
    in_all = replace(JOB, modules={**modules, names[2]: other})
    assert say(in_all) == [("attribute", names[2], "scaling", "0.125", "0.5")]
    # A replay of the first two layers alone.
    cut = {name: values for name, values in REPLAY.modules.items() if ".2." not in name}
    assert say(in_some, own=replace(REPLAY, modules=cut)) == [("attribute", names[2], "scaling", "0.125", "0.5")]


def test_a_forward_and_hooks_of_the_job_are_named() -> None:
    hooks = [["forward hook", "train.py:hook", "f1"]]
    job = change(JOB, "modules", lm_head={"forward": OWN_FORWARD, "hooks": hooks})
    assert say(job) == [
        ("forward", "lm_head", "", "train.py:forward", "torch.nn.modules.linear:Linear.forward"),
        ("hook", "lm_head", "forward hook", "train.py:hook", None),
    ]
    # What the replay's own model has too is no difference.
    assert say(job, own=change(REPLAY, "modules", lm_head={"forward": OWN_FORWARD, "hooks": hooks})) == []


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({}, True),
        ({"python": "cpython-312"}, False),
        ({"versions": {"torch": "2.13.0+cu128", "transformers": "5.17.0"}}, False),
        ({"versions": {"torch": "2.11.0", "transformers": "5.23.0"}}, True),
        ({"versions": {}}, False),
    ],
)
def test_code_is_compared_within_one_version(changes: Mapping[str, Any], is_said: bool) -> None:
    job = replace(change(JOB, "modules", **{"": {"code": "m9"}}), **changes)
    job = change(job, "functions", **{LLAMA: {"apply_rotary_pos_emb": ["", "r9"]}})
    job = replace(job, loss_function=["transformers.loss.loss_utils:ForCausalLMLoss", "c9"])
    expected = [
        ("forward", "the model", "code", "another text", f"{LLAMA}:LlamaForCausalLM"),
        ("function", f"{LLAMA}:apply_rotary_pos_emb", "", "another text", LLAMA),
        ("loss function", "the model", "", "another text", "transformers.loss.loss_utils:ForCausalLMLoss"),
    ]
    assert say(job) == (expected if is_said else [])


def test_the_jobs_own_code_is_compared_whatever_is_installed() -> None:
    own = change(REPLAY, "modules", lm_head={"class": "net.py:Head", "code": "h0"})
    job = replace(change(JOB, "modules", lm_head={"class": "net.py:Head", "code": "h9"}), versions={})
    assert say(job, own=own) == [("forward", "lm_head", "code", "another text", "net.py:Head")]


def test_what_a_file_of_the_job_s_imports_replaces_no_function() -> None:
    imported = {"train.py": {"batch": ["data.py:batch", "f5"]}}
    assert say(change(JOB, "functions", **imported)) == []
    own = change(REPLAY, "functions", **{"train.py": {"batch": ["", "f6"]}})
    assert say(change(JOB, "functions", **imported), own=own) == [
        ("function", "train.py:batch", "", "data.py:batch", "train.py")
    ]


def test_replaced_functions_are_named_in_any_version() -> None:
    job = replace(JOB, versions={}, patches={"torch.nn.functional.silu": ["train.py:silu", "f2"]})
    job = change(job, "functions", **{LLAMA: {"apply_rotary_pos_emb": ["train.py:rotate", "f3"]}})
    job = replace(job, loss_function=["train.py:smooth", "f4"], attention={"name": "mine", "function": OWN_FORWARD})
    assert say(job) == [
        ("function", f"{LLAMA}:apply_rotary_pos_emb", "", "train.py:rotate", LLAMA),
        ("function", "torch.nn.functional:silu", "", "train.py:silu", "torch.nn.functional"),
        ("attention function", "the model", "function", "train.py:forward", None),
        ("loss function", "the model", "", "train.py:smooth", "transformers.loss.loss_utils:ForCausalLMLoss"),
    ]


def test_a_library_kernel_that_is_not_there_is_no_difference() -> None:
    function = ["transformers.integrations.flash_attention:flash_attention_forward", "x"]
    assert say(replace(JOB, attention={"name": "flash_attention_2", "function": function})) == []


def test_a_function_that_the_replay_itself_puts_in_is_no_difference() -> None:
    replays = {"name": "sdpa", "function": ["actor_init.attention.kernels:sdpa", "x"]}
    assert say(JOB, own=replace(REPLAY, attention=replays)) == []
    [found] = say(
        replace(JOB, attention={"name": "sdpa", "function": OWN_FORWARD}), own=replace(REPLAY, attention=replays)
    )
    assert found[3] == "train.py:forward"


def test_fused_modules_are_no_difference() -> None:
    fused = {"forward": ["liger_kernel.transformers.swiglu:forward", "x"]}
    assert say(change(JOB, "modules", **{"model/layers/*/mlp": fused})) == []


def test_another_class_is_said_once_and_what_is_in_it_is_not() -> None:
    job = change(JOB, "modules", **{"model/layers/*/mlp": {"class": "train.py:MLP", "code": "x"}})
    job = change(job, "modules", **{"model/layers/*/mlp/gate": {"class": "train.py:Gate", "code": "x"}})
    assert say(job) == [("class", "model.layers.*.mlp", "", "train.py:MLP", f"{LLAMA}:LlamaMLP")]


def test_modules_of_one_of_the_two_are_named() -> None:
    job = change(JOB, "modules", lm_head=None, extra={"class": "train.py:Extra", "code": "x"})
    assert say(job) == [
        ("module", "extra", "", "train.py:Extra", None),
        ("module", "lm_head", "", None, "torch.nn.modules.linear:Linear"),
    ]


def test_frozen_parameters_and_their_hooks_are_named() -> None:
    job = change(JOB, "parameters", **{"model/layers/*/mlp/weight": {"trained": False}})
    assert say(job) == [("frozen parameter", "model", "", "frozen", "trained")]
    # Rollouts alone say nothing of training.
    assert say(replace(job, trains=False)) == []
    hooks = {"hooks": [["gradient hook", "train.py:double", "f5"]]}
    hooked = change(JOB, "parameters", **dict.fromkeys(["embed/weight", "lm_head/weight"], hooks))
    assert {where for _, where, *_ in say(hooked)} == {"embed.weight", "lm_head.weight"}
    hooked = change(hooked, "parameters", **{"model/layers/*/mlp/weight": hooks})
    assert say(hooked) == [("gradient hook", ALL_PARAMETERS, "gradient hook", "train.py:double", None)]


def test_a_bias_that_one_side_alone_has_is_named() -> None:
    bias = {"dtype": "float32", "trained": True}
    own = change(REPLAY, "parameters", **{f"model/layers/{layer}/mlp/bias": bias for layer in range(NUM_LAYERS)})
    assert say(JOB, own=own) == [("attribute", "model.layers.*.mlp", "bias", None, "a parameter")]
    job = change(JOB, "parameters", **{"model/layers/*/mlp/bias": bias})
    assert say(job, own=own) == []
    assert say(job) == [("attribute", "model.layers.*.mlp", "bias", "a parameter", None)]
    # Of a module whose weight has another name in the job nothing is known.
    assert say(JOB, own=change(REPLAY, "parameters", **{"model/new/bias": bias, "model/new/weight": bias})) == []


def test_what_is_frozen_later_is_named_with_its_pass() -> None:
    job = replace(JOB, frozen_later={"4": [], "2": ["lm_head.weight"]})
    assert say(job) == [("frozen parameter", "lm_head.weight", "", "frozen from pass 3 on", "trained")]
    own = change(REPLAY, "parameters", **{"lm_head/weight": {"trained": False}})
    frozen = change(JOB, "parameters", **{"lm_head/weight": {"trained": False}})
    assert say(replace(frozen, frozen_later={"2": ["lm_head.weight"]}), own=own) == []
    assert say(replace(frozen, frozen_later={"2": []}), own=own) == [
        ("frozen parameter", "lm_head.weight", "", "trained from pass 3 on", "frozen")
    ]


def test_a_module_whose_parameters_all_differ_stands_for_them() -> None:
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(NUM_LAYERS) for kind in ("q", "k")]
    own = replace(REPLAY, parameters={name: {"dtype": "float32", "trained": True} for name in [*names, "head.weight"]})
    frozen = {"dtype": "float32", "trained": False}
    job = replace(JOB, parameters={**own.parameters, names[0]: frozen, names[1]: frozen, names[2]: frozen})
    assert [where for _, where, *_ in say(job, own=own)] == ["model.layers.0", names[2]]
    job = replace(JOB, parameters={**own.parameters, **dict.fromkeys(names, frozen)})
    assert [where for _, where, *_ in say(job, own=own)] == ["model"]
    job = replace(JOB, parameters=dict.fromkeys(own.parameters, frozen))
    assert [where for _, where, *_ in say(job, own=own)] == [ALL_PARAMETERS]


def test_a_dtype_is_compared_with_that_of_the_other_parameters() -> None:
    assert (
        say(replace(JOB, parameters={name: {**row, "dtype": "bfloat16"} for name, row in JOB.parameters.items()})) == []
    )
    job = change(JOB, "parameters", **{"lm_head/weight": {"dtype": "bfloat16"}})
    assert say(job) == [("dtype", "lm_head.weight", "", "bfloat16", "as the others, float32 in the job")]
    # The class gives it this dtype itself.
    assert say(job, own=change(REPLAY, "parameters", **{"lm_head/weight": {"dtype": "bfloat16"}})) == []
    in_bf16 = {name: {**row, "dtype": "bfloat16"} for name, row in JOB.parameters.items()}
    job = change(replace(JOB, parameters=in_bf16), "parameters", **{"lm_head/weight": {"dtype": "float32"}})
    assert len(say(job)) == 1
    assert say(job, parameters={"lm_head.weight": OwnParameter(may_be_fp32=True)}) == []


def test_a_parameter_that_its_class_freezes_is_not_compared() -> None:
    own = change(REPLAY, "parameters", **{"lm_head/weight": {"trained": False}})
    assert say(JOB, own=own) == [("frozen parameter", "lm_head.weight", "", "trained", "frozen")]
    assert say(JOB, own=own, parameters={"lm_head.weight": OwnParameter(is_frozen_by_class=True)}) == []


@pytest.mark.parametrize(
    ("job_ties", "own_ties", "words"),
    [
        ([], [["embed.weight", "lm_head.weight"]], ("tensors of their own", "one tensor")),
        ([["embed.weight", "lm_head.weight"]], [], ("one tensor", "tensors of their own")),
        ([["embed.weight", "lm_head.weight"]], [["embed.weight", "lm_head.weight"]], None),
        # What the replay does not know is not compared.
        ([["embed.weight", "value_head.weight"]], [], None),
    ],
)
def test_ties_are_compared(job_ties: Any, own_ties: Any, words: tuple[str, str] | None) -> None:
    found = say(replace(JOB, tied=job_ties), own=replace(REPLAY, tied=own_ties))
    assert found == ([] if words is None else [("tied weights", "embed.weight and lm_head.weight", "", *words)])


def test_a_buffer_may_be_rounded_to_its_dtype() -> None:
    rounded = {"dtype": "bfloat16", "values": [1.0, 0.01001], "norm": 1.0}
    assert say(change(JOB, "buffers", **{"rotary/inv_freq": rounded})) == [
        ("buffer", "rotary.inv_freq", "dtype", "bfloat16", "float32")
    ]
    other = {"values": [1.0, 0.0014], "norm": 1.0}
    assert say(change(JOB, "buffers", **{"rotary/inv_freq": other})) == [
        ("buffer", "rotary.inv_freq", "", "1, 0.0014", "1, 0.01")
    ]
    zeros = {"values": [0.0, 0.0], "norm": 0.0}
    assert say(change(JOB, "buffers", **{"rotary/inv_freq": zeros})) == [
        ("buffer", "rotary.inv_freq", "", ALL_ZEROS, "1, 0.01")
    ]


def test_frequencies_that_follow_the_longest_row_are_not_compared() -> None:
    other = {"values": [1.0, 0.0014], "norm": 1.0}
    job = change(JOB, "buffers", **{"rotary/inv_freq": other})
    rotary = {"class": f"{LLAMA}:LlamaRotaryEmbedding", "code": "q", "attributes": {"rope_type": "dynamic"}}
    assert say(change(job, "modules", rotary=rotary), own=change(REPLAY, "modules", rotary=rotary)) == []


def test_what_a_wrapper_has_other_than_usual_is_named() -> None:
    usual = {"class": "DistributedDataParallel", "parameters_to_ignore": [], "comm_hooks": []}
    assert say(replace(JOB, wrappers=[usual])) == []
    unusual = {**usual, "comm_hooks": [["train.py:hook", "x"]], "parameters_to_ignore": ["a", "b"]}
    engine = {"class": "DeepSpeedEngine", "gradient_average": False, "replaced": {"average_tensor": OWN_FORWARD}}
    assert say(replace(JOB, wrappers=[unusual, engine])) == [
        ("wrapper", "DistributedDataParallel", "parameters_to_ignore", "a, b", "none"),
        ("wrapper", "DistributedDataParallel", "comm_hooks", "train.py:hook", "none"),
        ("wrapper", "DeepSpeedEngine", "gradient_average", "False", "True"),
        ("wrapper", "DeepSpeedEngine", "average_tensor", "train.py:forward", "DeepSpeedEngine's own"),
    ]


def test_the_ranks_that_differ_are_named_where_not_all_do() -> None:
    hooked = change(JOB, "modules", lm_head={"hooks": [["forward hook", "train.py:hook", "f1"]]})
    ranks = [JOB, replace(hooked, rank=1), replace(hooked, rank=2)]
    [found] = compare_models(ranks, OwnModel(facts=REPLAY))
    assert found == ModelDifference(
        kind=ModelDifferenceKind.HOOK,
        where="lm_head",
        key="forward hook",
        job="train.py:hook",
        replay=None,
        ranks=(1, 2),
    )
    [found] = compare_models(ranks[1:], OwnModel(facts=REPLAY))
    assert found.ranks == ()


def test_an_adapter_that_is_not_built_here_is_not_compared() -> None:
    peft = {"class": "peft.tuners.other:Linear", "code": "p"}
    job = change(
        JOB, "modules", lm_head=peft, **{"lm_head/base_layer": {"class": "torch.nn.modules.linear:Linear", "code": "h"}}
    )
    job = replace(job, parameters={name: {**row, "trained": False} for name, row in JOB.parameters.items()})
    assert say(job) == []


def make_pass(forward: int, *, rank: int, sync: str | None, ends_step: bool) -> RecordedPass:
    step = OptimizerStep(number=forward // 2, passes=[forward - 1, forward], shares=[0.5, 0.5]) if ends_step else None
    return RecordedPass(
        rank=rank,
        forward_number=forward,
        world_size=2,
        trains=True,
        claims=(),
        weight_comparison=WeightComparison(),
        num_frozen=0,
        dtypes=(),
        environment={} if sync is None else {"gradient_sync": sync},
        num_steps_before=forward // 2,
        step_after=step,
    )


def make_passes(last_syncs: Sequence[str | None]) -> list[RecordedPass]:
    """Two passes a step, on rank 0 and rank 1; of the first one DDP reduces nothing."""
    first = [make_pass(2 * number, rank=rank, sync="off", ends_step=False) for number in range(2) for rank in range(2)]
    return first + [
        make_pass(2 * (place // 2) + 1, rank=place % 2, sync=sync, ends_step=True)
        for place, sync in enumerate(last_syncs)
    ]


@pytest.mark.parametrize(
    ("last_syncs", "job", "ranks"),
    [
        (["on"] * 4, None, ()),
        ([None] * 4, None, ()),
        (["off"] * 4, "off in the last pass before 2 of 2 steps", ()),
        (["on", "on", "off", "off"], "off in the last pass before 1 of 2 steps", ()),
        (["on", "off", "on", "off"], "off in the last pass before 2 of 2 steps", (1,)),
    ],
)
def test_steps_without_a_reduction_are_named(last_syncs: Any, job: str | None, ranks: tuple[int, ...]) -> None:
    found = [
        (difference.job, difference.ranks) for difference in find_unreduced_step_differences(make_passes(last_syncs))
    ]
    assert found == ([] if job is None else [(job, ranks)])


def test_the_size_of_a_vocabulary_is_no_setting_that_a_forward_computes_with() -> None:
    """A model whose embedding was resized keeps the old number in an attribute."""
    own = {**REPLAY.modules[""], "attributes": {"vocab_size": 256, "eps": 1.0}}
    job = {**JOB.modules[""], "attributes": {"vocab_size": 250, "eps": 2.0}}
    replayed, recorded = change(REPLAY, "modules", **{"": own}), change(JOB, "modules", **{"": job})
    assert [key for _, _, key, _, _ in say(recorded, own=replayed)] == ["eps"]
