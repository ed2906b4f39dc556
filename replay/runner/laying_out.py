"""Lay a captured micro-batch out on the device as an actor is fed."""

from dataclasses import replace

from actor_init.attention.cudnn import refuse_holes
from actor_init.attention.kernel_choice import kernel_name
from actor_init.attention.ring import may_zigzag, ring_slice
from actor_init.declarations.attention import form_of
from actor_init.inputs.packing import ActorInputs, actor_inputs, arranged, padded_to, sliced
from actor_init.model import ModelSource
from actor_init.spec import ActorSpec, PadTo
from actor_init.world import World
from capture.facts import Setting
from capture.file_format.micro_batch import CaptureError, MicroBatch


def inputs_for(batch: MicroBatch, spec: ActorSpec, source: ModelSource, world: World) -> ActorInputs:
    """Return `batch` on the device, laid out, padded and sliced as the source and the spec say.

    Raises CaptureError if it is not valid input for the model. All ranks must call this.
    """
    check_vocabulary(batch, source)
    layout = source.layout_under(spec)
    inputs = arranged(actor_inputs(batch, packing=layout.joins), layout)
    if inputs.attention_mask_BS is not None and not form_of(kernel_name(spec, world.device, source.config)).takes_holes:
        refuse_holes(inputs.attention_mask_BS, str(batch.origin.source))
    if spec.pad_to is PadTo.LONGEST:
        inputs = padded_to(inputs, max(world.gather(inputs.input_ids.shape[1])))
    num_tokens = inputs.input_ids.shape[1]
    if (length := spec.padded_length(num_tokens)) is None:
        why = f": a row of {num_tokens} tokens is longer than each of {Setting('pad_tokens', spec.pad_tokens)}"
        raise CaptureError(batch.origin.source, why, f"Add a length of at least {num_tokens}")
    inputs = padded_to(inputs, length)
    if spec.parallel.sequence_parallel:  # a rank would count its own part of a row
        inputs = replace(inputs, makes_positions=False)
    if spec.parallel.ring > 1:
        assert inputs.cu_seq_lens is not None
        ring = ring_slice(
            inputs.cu_seq_lens,
            world.ring_group,
            head_stride=spec.parallel.ring_head_stride,
            may_zigzag=may_zigzag(source.config),
        )
        inputs = sliced(inputs, ring)
    return replace(inputs, head=source.head).to(world.device)


def check_vocabulary(batch: MicroBatch, source: ModelSource) -> None:
    """Raise CaptureError for token ids outside the model's vocabulary."""
    largest, size = int(batch.sequences_BS.max()), source.config.get_text_config().vocab_size
    if largest >= size:
        why = f": token id {largest} is beyond the model's vocabulary of {size}; these inputs belong to another model"
        raise CaptureError(batch.origin.source, why, f"Name it with {Setting('model')}")
