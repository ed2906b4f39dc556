"""Make a family's tiny model, one micro-batch, and the answer of the plain model to it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.families.configs import VOCABULARY, tiny_config
from capture.file_format.capture_file import write_call
from capture.file_format.micro_batch import Origin

LENGTHS = (5, 9, 12)  # of the documents
SPREAD = 0.1  # added to vectors, which are constant in a model that was never trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Loss and gradient norm of the plain model, each document alone."""

    loss: float
    grad_norm: float


def documents() -> list[Tensor]:
    """Return the token ids of each document; the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def write_inputs(folder: Path) -> Path:
    """Write the documents as one micro-batch, a row each, padded on the right."""
    folder.mkdir(parents=True)
    ids_BS = nn.utils.rnn.pad_sequence(documents(), batch_first=True)
    mask_BS = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in documents()], batch_first=True).bool()
    tensors = {"sequences": ids_BS, "attention_mask": mask_BS, "action_mask": mask_BS[:, 1:]}
    origin = Origin(
        source="", rank=0, world_size=1, step=0, time="2026-01-01T00:00:00+00:00", model_name="tiny", versions={}
    )
    return write_call(folder, tensors, {}, trains=True, origin=origin)


def save_family(family: str, folder: Path) -> Answer:
    """Save the model as `save_pretrained` does, and its answer beside it."""
    torch.manual_seed(0)
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    assert isinstance(model, PreTrainedModel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += SPREAD * torch.randn_like(parameter)
        for name, buffer in model.state_dict().items():
            if buffer.ndim == 1 and "bias" in name:
                buffer += SPREAD * torch.rand_like(buffer)
    answer = answer_of(model)
    model.save_pretrained(folder)
    (folder / "answer.json").write_text(json.dumps(asdict(answer)))
    return answer


def read_answer(folder: Path) -> Answer:
    """Return what `save_family` left in `folder`."""
    return Answer(**json.loads((folder / "answer.json").read_text()))


def answer_of(model: PreTrainedModel) -> Answer:
    """Compute the mean loss over the tokens behind each document's first, and the norm of its gradient."""
    model.train()
    losses = []
    for ids_S in documents():
        logits_SV = model(input_ids=ids_S[None], use_cache=False).logits[0]
        losses.append(nn.functional.cross_entropy(logits_SV[:-1].float(), ids_S[1:], reduction="sum"))
    loss = torch.stack(losses).sum() / sum(length - 1 for length in LENGTHS)
    torch.autograd.backward(loss)
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return Answer(loss=float(loss.detach()), grad_norm=float(torch.stack(norms).norm()))
