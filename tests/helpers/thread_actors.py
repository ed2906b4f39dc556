"""Small actors in shards, on ranks that are threads of this process, and what they are fed."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from actor_init.attention.ring_split import compute_ring_indices, may_zigzag
from actor_init.declarations.backends import BACKENDS
from actor_init.inputs.packing import ActorInputs, prepare_inputs, slice_for_ring
from actor_init.model import ModelSource, make_random_weights
from actor_init.model_form import HeadForm
from actor_init.spec import ActorSpec, Dtype, ParallelSpec
from actor_init.world import World
from capture.file_format.micro_batch import MicroBatch, Origin
from tests.helpers.families import tiny_config
from tests.helpers.sharded import MODELS, SIZES

RATE, LIMIT_OF_NORM = 0.1, 0.5


@dataclass(frozen=True, kw_only=True)
class ShardedCase:
    """One actor.

    lengths        of the documents of a pass
    options        of its spec, beside those that all have
    config         what the model's has beside that of its name
    with_entropies the loss has the entropies in it, too
    """

    model: str
    num_ranks: int
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    backend: str = "fsdp2"
    lengths: tuple[int, ...] = (7, 12)
    packing: bool = True
    head: HeadForm | None = None
    num_passes: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    with_entropies: bool = True

    @property
    def num_data_ranks(self) -> int:
        return self.num_ranks // (self.parallel.tp * self.parallel.ring)

    def make_config(self) -> PretrainedConfig:
        if self.model in MODELS:
            config: PretrainedConfig = AutoConfig.for_model(**{**SIZES, **MODELS[self.model], **self.config})
            return config
        return tiny_config(self.model, **self.config)

    def make_batch(self, data_rank: int, number: int) -> MicroBatch:
        """Make the pass with this number of a data rank; rows are padded on the left.

        A token of each is the model's padding, whose embedding gets no gradient, in another place than padding.
        """
        config = self.make_config()
        random = torch.Generator().manual_seed(100 * data_rank + number)
        longest = max(self.lengths)
        ids_BS = torch.randint(3, config.vocab_size, (len(self.lengths), longest), generator=random)
        ids_BS[:, -2] = config.pad_token_id or 3
        # The tokens beside the border of two ranks' shares of the vocabulary, and the last one.
        border = -(-config.vocab_size // 2)
        ids_BS[self.lengths.index(longest), -6:-3] = torch.tensor([border - 1, border, config.vocab_size - 1])
        real_BS = torch.arange(longest) >= longest - torch.tensor(self.lengths)[:, None]
        return MicroBatch(sequences_BS=ids_BS, attention_mask_BS=real_BS, trains=True, origin=Origin(source="made"))

    def make_source(self) -> ModelSource:
        """Make the model, whose weights keep the vectors that they were once asked for.

        Threads would disturb each other where they make them, so a thread has asked for all before.
        """
        config = self.make_config()
        return ModelSource(name="tiny", config=config, weights=make_random_weights(config, 0))

    def make_spec(self) -> ActorSpec:
        options: dict[str, Any] = {
            "backend": self.backend,
            "dtype": Dtype.FP32,
            "packing": self.packing,
            "parallel": self.parallel,
            "optimizer": "sgd",
            "learning_rate": RATE,
            "max_norm": LIMIT_OF_NORM,
            "grad_accumulation": self.num_passes,
        }
        return ActorSpec(**options | self.options).with_defaults()

    def open_actor(self, source: ModelSource, world: World) -> Any:
        module, name = BACKENDS[self.backend].engine.split(":")
        return getattr(import_module(module), name).open(self.make_spec(), source, world)

    def make_inputs(self, source: ModelSource, world: World) -> Iterator[ActorInputs]:
        """Make what this rank is fed in the passes of a window."""
        for number in range(self.num_passes):
            inputs = prepare_inputs(self.make_batch(world.data_rank, number), packing=self.packing)
            if self.parallel.ring > 1:
                assert inputs.cu_seq_lens is not None
                stride, zigzag = self.parallel.ring_head_stride, may_zigzag(source.config)
                ring = compute_ring_indices(inputs.cu_seq_lens, world.ring_group, head_stride=stride, may_zigzag=zigzag)
                assert ring.is_zigzag is (len(self.lengths) == 1)
                inputs = slice_for_ring(inputs, ring)
            yield replace(inputs, head=self.head)
