"""Put what an error says into the words of the command line: settings become the flags that are typed for them."""

from capture.facts import FactError, Setting, flag_of, worded
from replay.options.option_parsing import toggles


def in_flags(said: BaseException | str) -> str:
    """Return an error's sentence, or one from `FactError.text`, as the terminal shows it."""
    if isinstance(said, FactError):
        said = said.text
    return worded(str(said), as_typed)


def as_typed(setting: Setting) -> str:
    """Return `--tp 2` or `--no-packing`; without a value `--tp`.

    The flags are those of the options that the field declares; a setting of `capture` is no option here.
    """
    declared = [toggle for toggle in toggles() if toggle.field == setting.name]
    toggle = next((toggle for toggle in declared if not toggle.is_switch or toggle.sets == setting.value), None)
    if toggle is None:
        flag = declared[0].flag if declared else flag_of(setting.name)
        return f"{flag} {setting.value}" if setting.has_value and not declared else flag
    return " ".join(toggle.as_typed(setting.value)) if setting.has_value else toggle.flag
