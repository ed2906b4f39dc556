"""The forms under which each family is replayed."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A replay's arguments, and the ranks that share the model."""

    name: str
    arguments: tuple[str, ...]
    tp: int = 1
    ring: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.ring


FORMS = {
    form.name: form
    for form in (
        Form(name="packed deepspeed", arguments=("--backend", "deepspeed")),
        Form(name="packed fsdp2", arguments=("--backend", "fsdp2")),
        Form(name="padded fsdp2", arguments=("--backend", "fsdp2", "--no-packing")),
        Form(name="tp 2", arguments=("--backend", "fsdp2", "--no-packing", "--tp", "2"), tp=2),
        Form(name="ring 2", arguments=("--backend", "fsdp2", "--ring", "2"), ring=2),
    )
}
