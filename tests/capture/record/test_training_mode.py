from torch import nn

from capture.file_format.tensor_codec import TrainingMode
from capture.record.training_mode import TrainingModeReader, read_training_mode


class DistributedDataParallel(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.head = nn.Linear(2, 2)


def read_in_a_pass(reader: TrainingModeReader) -> TrainingMode | None:
    expected = reader.expect()
    return reader.correct() or expected


def test_a_part_in_eval_mode_is_named_once_and_what_trains_inside_it_too() -> None:
    model = TwoParts()
    reader = TrainingModeReader(model)
    assert read_in_a_pass(reader) == {"model": True, "parts": []}
    model.encoder.eval()
    assert read_in_a_pass(reader) == {"model": True, "parts": ["encoder"]}
    model.encoder[1].train()
    assert read_in_a_pass(reader) == {"model": True, "parts": ["encoder", "encoder.1"]}
    model.eval()
    assert read_in_a_pass(reader) == {"model": False, "parts": []}


def test_what_a_pass_begins_with_is_known_from_the_model_s_own_flag_and_corrected_where_it_ends() -> None:
    model = TwoParts()
    reader = TrainingModeReader(model)
    assert reader.expect() == {"model": True, "parts": []}
    assert reader.correct() is None
    model.encoder.eval()
    assert reader.expect() == {"model": True, "parts": []}
    assert reader.correct() == {"model": True, "parts": ["encoder"]}
    assert reader.correct() is None
    model.eval()
    assert reader.expect() == {"model": False, "parts": []}
    assert reader.correct() is None


def test_the_flag_is_that_of_the_model_inside_its_wrapper() -> None:
    """A job may call `eval` of the model that it gave to DDP: the wrapper's flag stays."""
    model = TwoParts()
    wrapper = DistributedDataParallel(model)
    model.eval()
    assert wrapper.training
    assert read_training_mode(wrapper) == {"model": False, "parts": []}
    model.head.train()
    assert read_training_mode(wrapper)["parts"] == ["head"]
