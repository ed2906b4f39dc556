"""What is taken from a user's file, and the one line for each mistake in it. About 15 seconds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actor_init.custom.user_file import UserFunction
from actor_init.model import ModelSource, build_on_meta, find_blocks, find_model, materialise
from actor_init.spec import ActorSpec, Attention, ParallelSpec, UsageError
from tests.custom_models import odd

FOLDER = Path("tests") / "custom_models"
ODD = f"{FOLDER / 'odd.py'}"
CPU = torch.device("cpu")


def open_source(function: str, captured: dict[str, Any] | None = None, **options: Any) -> ModelSource:
    return find_model(ActorSpec(model=f"{ODD}:{function}", **options), captured, "captured")


def build_model(source: ModelSource) -> Any:
    model = build_on_meta(source.config, attention="its own", dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    materialise(model, source.weights, CPU)
    return model


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nope", f"{Path(ODD).resolve()} has no function nope. It has Tiny, Sequence"),
        ("raises", "raises raised RuntimeError: no such model, at {file}:"),
        ("leaves", "leaves raised SystemExit: 3, at {file}:"),
        ("nothing", "nothing returned None. It has to return the torch.nn.Module"),
        ("Sequence", "Sequence has no nn.ModuleList of layers, .* Try: blocks='layers'"),
        ("Pixels", "takes no token ids: allowed are input_ids, idx, tokens, or a first argument"),
        ("Needs", "the forward of Needs needs rope, which a replay does not have"),
        ("Hidden", r"returned float32 \[2, 5\] for token ids \[2, 5\]. Allowed are logits"),
        ("LossAlone", "returned a dict with loss, and no logits in it"),
        ("LastToken", r"returned float32 \[2, 1, 64\] for token ids \[2, 5\], those of the last token alone"),
        ("needs_one", "needs_one needs config, and there is no actor.json"),
        ("needs_two", "needs_two needs config, other, and is called with the captured config at most"),
        ("loads", "loads loads weights, and those would be lost: .* weights='FILE'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(function: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.format(file=Path(ODD).resolve())) as refusal:
        open_source(function)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory. Try: model='FILE.py:function'"),
        ("def broken(:", "it raised SyntaxError: .*, at {file}:1"),
        ("\nimport nothing_there", "it raised ModuleNotFoundError: No module named 'nothing_there', at {file}:2"),
    ],
)
def test_a_file_that_does_not_run_is_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message.format(file=file)):
        find_model(ActorSpec(model=f"{file}:build"), None, "captured")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": ParallelSpec(tp=2)}, "tp=2 needs a plan"),
        ({"parallel": ParallelSpec(ring=2)}, "ring=2 slices attention"),
        ({"packing": True}, "packing=True needs attention that stays within a document"),
        ({"attention": Attention.SDPA}, "attention='sdpa' chooses transformers' kernels"),
        ({"adapter": "x"}, "adapter='x' goes into transformers' models, not into model='mine.py:build'. Leave it out"),
        (
            {"weights": Path("x.pt"), "random_weights": True},
            "weights='x.pt' and random_weights=True exclude each other",
        ),
    ],
)
def test_what_only_transformers_models_can_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ActorSpec(model="mine.py:build", **options)


@pytest.mark.parametrize("model", ["mine.py", "mine.py:"])
def test_a_file_without_a_function_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match=f"model='{model}' names no function. Try: model='mine.py:FUNCTION'"):
        ActorSpec(model=model)


@pytest.mark.parametrize("options", [{"weights": Path("x")}, {"blocks": "x"}])
def test_options_of_a_user_s_model_are_for_no_other(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"x' is for model='FILE.py:function'"):
        ActorSpec(model="llama-3.1-8b", **options)


def test_rows_of_a_user_s_model_stay_padded() -> None:
    spec = ActorSpec(model="mine.py:build")
    assert not spec.packs
    assert spec.with_defaults(attention=Attention.EAGER).packing is False
    assert spec.with_defaults(attention=Attention.EAGER).attention == Attention.AUTO


def test_the_function_is_given_the_captured_config() -> None:
    assert open_source("needs_one", {"vocab_size": 32}).config.vocab_size == 32
    assert open_source("takes_one", {"vocab_size": 32}).config.vocab_size == 32
    assert open_source("takes_one").config.vocab_size == 64


def test_layers_are_cut_and_named() -> None:
    model = build_on_meta(open_source("Tiny", num_layers=2).config, attention="", dtype=torch.float32)
    assert [name for name, _ in find_blocks(model)] == ["layers.0", "layers.1"]
    named = open_source("Sequence", blocks="layers").config
    assert (named.num_hidden_layers, named.vocab_size, named.hidden_size) == (3, 64, 8)
    with pytest.raises(UsageError, match=r"num_layers=4, but layers has 3. Allowed: 1 to 3"):
        open_source("Tiny", num_layers=4)
    with pytest.raises(UsageError, match=r"blocks='head' is no list of layers in the Tiny of odd.py:Tiny"):
        open_source("Tiny", blocks="head")


def test_buffers_and_ties_stay_what_the_code_makes_them() -> None:
    model = build_model(open_source("Rotary"))
    assert model.embedding.weight is model.head.weight
    assert torch.equal(model.table, torch.linspace(0, 1, 8))
    assert torch.equal(model.get_buffer("other"), torch.linspace(1, 2, 8))
    # The values are random by name. Those of the code are zeros.
    assert model.embedding.weight.std() > 0.01


def test_random_weights_are_the_same_in_each_build_and_around_the_code_s_own() -> None:
    first, second = (build_model(open_source("Tiny")) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert (first.norm.weight - 1).abs().max() < 0.1
    cut = build_model(open_source("Tiny", num_layers=1))
    assert torch.equal(cut.layers[0].weight, first.layers[0].weight)


def test_a_module_made_once_in_the_file_is_left_alone() -> None:
    source = open_source("the_same")
    before = {name: values.clone() for name, values in odd.ONE.state_dict().items()}
    first, second = build_model(source), build_model(source)
    assert torch.equal(first.head.weight, second.head.weight)
    assert first is not second
    assert all(torch.equal(values, before[name]) for name, values in odd.ONE.state_dict().items())


def test_a_forward_gets_the_keywords_that_it_names() -> None:
    model = build_model(open_source("Masked"))
    ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[True, True, False]])
    logits = model(input_ids=ids, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2]]), use_cache=False).logits
    plain = model.logits(ids)
    assert torch.equal(logits[:, :2], plain[:, :2])
    assert torch.allclose(logits[:, 2], plain[:, 2] + 0.02)


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

class OddConfig(LlamaConfig):
    model_type = "odd_remote"

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""
LOADER = """
from transformers import AutoConfig, AutoModelForCausalLM as Model
def build(folder={folder!r}):
    return Model.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=True), trust_remote_code=True)
"""


def test_remote_code_runs_where_the_user_names_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    original = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=2)).eval()
    original.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "odd_remote"}
    config["auto_map"] = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "odd.py").write_text(f"open({str(tmp_path / 'has-run')!r}, 'w').close()\n{REMOTE}")
    with pytest.raises(UsageError, match=r"Try: model='FILE.py:build', weights='FOLDER'"):
        find_model(ActorSpec(model=str(folder)), None, "captured")
    assert not (tmp_path / "has-run").exists()
    file = tmp_path / "mine.py"
    file.write_text(LOADER.format(folder=str(folder)))
    source = find_model(ActorSpec(model=f"{file}:build", weights=folder), None, "captured")
    model = build_model(source).eval()
    ids = torch.arange(1, 7)[None]
    mask, positions = torch.ones_like(ids), torch.arange(6)[None]
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        assert torch.equal(logits, original(input_ids=ids).logits)
    assert source.config.num_hidden_layers == 2


CHECKPOINTS = ["model.safetensors", "ckpt.pt", "model.pth", "folder", "folder of torch"]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_weights_are_read_by_name(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = odd.Tiny()
    path = write_weights(original, kind, tmp_path)
    source = open_source("Tiny", weights=path)
    model = build_model(source)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    sample = source.weights.sample("layers.1.weight", (8, 8), 10, 3)
    assert sample is not None
    assert torch.equal(sample, original.layers[1].weight.detach().flatten()[10:13])  # type: ignore[operator]


MIXTURE = """
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
def build():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, vocab_size=32))
"""


def test_a_mixture_that_transformers_saved_fills_a_user_s_copy_of_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MIXTURE)
    original = UserFunction.open(file, "build").build(None)
    assert isinstance(original, PreTrainedModel)
    original.save_pretrained(tmp_path / "saved")
    saved = {name for path in (tmp_path / "saved").glob("*.safetensors") for name in load_file(path)}
    # Experts are saved one by one.
    assert "model.layers.0.mlp.experts.2.down_proj.weight" in saved
    source = find_model(ActorSpec(model=f"{file}:build", weights=tmp_path / "saved"), None, "captured")
    filled = dict(build_model(source).named_parameters())
    for name, parameter in original.named_parameters():
        assert torch.equal(filled[name], parameter), name
    name = "model.layers.0.mlp.experts.gate_up_proj"
    sample = source.weights.sample(name, filled[name].shape, 20, 4)
    assert sample is not None
    assert torch.equal(sample, filled[name].flatten()[20:24])


def write_weights(module: nn.Module, kind: str, home: Path) -> Path:
    weights: dict[str, Tensor] = module.state_dict()
    match kind:
        case "model.safetensors":
            save_file(weights, home / kind)
        case "ckpt.pt":
            wrapped = {f"_orig_mod.module.{name}": values for name, values in weights.items()}
            torch.save({"model": wrapped, "optimizer": {"lr": 1.0}, "iter_num": 3}, home / kind)
        case "model.pth":
            torch.save(weights, home / kind)
        case "folder":
            names = list(weights)
            for number in range(2):
                save_file({name: weights[name] for name in names[number::2]}, home / f"part-{number}.safetensors")
            return home
        case "folder of torch":
            torch.save(weights, home / "pytorch_model.bin")
            return home
    return home / kind


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pt", None, "none.pt': does not exist. Give a safetensors or torch file"),
        ("some.txt", b"", "is no checkpoint, by its name"),
        ("torn.safetensors", b"torn", "torn.safetensors cannot be read"),
        ("torn.pt", b"torn", "torn.pt cannot be read"),
        ("", b"", "has none. Give a safetensors or torch file"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_one_line(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    if name and content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as refusal:
        open_source("Tiny", weights=tmp_path / name)
    assert "\n" not in str(refusal.value)


def test_numbers_beside_the_tensors_of_a_checkpoint_are_no_section_of_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = odd.Tiny()
    others = {"model": {}, "iter_num": 3}
    torch.save({**original.state_dict(), **others}, tmp_path / "flat.pt")
    model = build_model(open_source("Tiny", weights=tmp_path / "flat.pt"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))


@pytest.mark.parametrize("kept", ["embedding", "head"])
def test_a_tied_weight_may_have_either_of_its_names_in_a_checkpoint(kept: str, tmp_path: Path) -> None:
    """safetensors keeps one of them."""
    file = tmp_path / "mine.py"
    file.write_text(PADDED_VOCABULARY)
    original: Any = UserFunction.open(file, "tied").build(None)
    with torch.no_grad():
        original.head.weight.normal_()
    weights = {name: values for name, values in original.state_dict().items() if name != f"{other_of(kept)}.weight"}
    save_file({name: values.clone() for name, values in weights.items()}, tmp_path / "model.safetensors")
    source = find_model(ActorSpec(model=f"{file}:tied", weights=tmp_path / "model.safetensors"), None, "captured")
    model = build_model(source)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, original.head.weight)


def other_of(kept: str) -> str:
    return {"embedding": "head", "head": "embedding"}[kept]


PADDED_VOCABULARY = """
from torch import nn

class Model(nn.Module):
    def __init__(self, in_embedding, in_head):
        super().__init__()
        self.positions = nn.Embedding(50, 8)
        self.embedding = nn.Embedding(in_embedding, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, in_head)

    def forward(self, ids):
        return self.head(self.layers[0](self.embedding(ids)))

def wide_embedding():
    return Model(40, 30)

def wide_head():
    return Model(30, 40)

def tied():
    model = Model(30, 30)
    model.head.weight = model.embedding.weight
    return model
"""


@pytest.mark.parametrize("function", ["wide_embedding", "wide_head"])
def test_the_vocabulary_is_of_ids_that_can_be_looked_up_and_predicted(function: str, tmp_path: Path) -> None:
    """Either may be padded to a round number. A table of positions, which is larger here, is none of ids."""
    file = tmp_path / "mine.py"
    file.write_text(PADDED_VOCABULARY)
    config = find_model(ActorSpec(model=f"{file}:{function}", random_weights=True), None, "captured").config
    assert (config.vocab_size, config.hidden_size) == (30, 8)


def test_another_model_s_checkpoint_is_refused(tmp_path: Path) -> None:
    save_file({"embedding.weight": torch.zeros(64, 9)}, tmp_path / "wide.safetensors")
    with pytest.raises(UsageError, match=r"embedding.weight has shape \[64, 9\], and the model's is \[64, 8\]"):
        build_model(open_source("Tiny", weights=tmp_path / "wide.safetensors"))
    save_file({"embedding.weight": torch.zeros(64, 8)}, tmp_path / "few.safetensors")
    with pytest.raises(UsageError, match=r"has nothing named layers.0.weight \(it has 1 tensors"):
        build_model(open_source("Tiny", weights=tmp_path / "few.safetensors"))
