"""Doubt the loss of a mixture of experts to which the model added its routers' loss: the replay computes none.

transformers adds it where labels are given and `output_router_logits` is asked for, by the call or by the config.
"""

from collections.abc import Iterable
from dataclasses import replace

from transformers import PretrainedConfig

from capture.file_format.capture_file import Call
from replay.tolerances.job import GRAD_NORM, LOSS
from replay.verdict.job_values import Claim, Recorded

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_alpha")
DOUBT = "it holds the routers' auxiliary loss, which the replay does not compute"


def without_router_loss(recorded: Recorded, call: Call, config: PretrainedConfig) -> Recorded:
    """Return `recorded`, its loss and gradient norm doubted if the job's model added that loss to its own."""
    if not adds_router_loss(call, config):
        return recorded
    return replace(recorded, claims=[_doubted(claim) for claim in recorded.claims])


def adds_router_loss(call: Call, config: PretrainedConfig) -> bool:
    text = config.get_text_config()
    coefficients = [value for name in COEFFICIENTS if isinstance(value := getattr(text, name, None), (int, float))]
    asked = call.call_facts.get("output_router_logits")
    if asked is None:
        asked = getattr(text, "output_router_logits", False)
    return bool(asked) and any(coefficients) and "labels" in call.tensors


def is_mixture(parameters: Iterable[str]) -> bool:
    """Tell by the names of its parameters whether a model has experts that a router chooses from."""
    return any(word in name for name in parameters for word in ("expert", "router"))


def _doubted(claim: Claim) -> Claim:
    return replace(claim, doubt=DOUBT) if claim.name in (LOSS, GRAD_NORM) else claim
