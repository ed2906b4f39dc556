"""Take the states of all random generators before a pass, and set them back for a replay of it.

The job's thread keeps the generators' own objects; the writer's thread turns them into plain data. NumPy's generator is
taken if the job has loaded NumPy, which is never imported here.
"""

import _random
import ctypes
import random
import struct
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capture.file_format.tensor_codec import NumpyState, RandomStates, view_bytes

# Whether autograd is on in a pass, and whether the model is in training mode.
PassKind = tuple[bool, bool]
# So many forwards in a row that drew nothing from the host's generators tell that the next one will not either.
NUM_QUIET = 8
# The state of Python's generator: 624 words and a position.
_NUM_WORDS = 625
# So many bytes at each end of a generator's memory tell whether it was used.
_NUM_END_BYTES = 64


class HostStates(NamedTuple):
    """The states of the generators that draw on the host, as the generators' own objects.

    numpy  None if NumPy is not loaded
    cpu    that of torch's generator for the CPU
    """

    python: tuple[Any, ...]
    numpy: Mapping[str, Any] | None
    cpu: Tensor

    def equals(self, other: "HostStates") -> bool:
        # An object is made anew after a use of its generator alone.
        has_same_python = self.python is other.python or self.python == other.python
        has_same_numpy = self.numpy is other.numpy or _make_plain_numpy(self.numpy) == _make_plain_numpy(other.numpy)
        return has_same_python and has_same_numpy and torch.equal(self.cpu, other.cpu)

    def to_plain(self) -> RandomStates:
        """Return the states as plain data, as they are written."""
        version, words, gauss = self.python
        states: RandomStates = {
            "python": {"version": version, "state": struct.pack(f"<{_NUM_WORDS}I", *words), "gauss": gauss},
            "torch": {"cpu": bytes(view_bytes(self.cpu))},
        }
        if (numpy := _make_plain_numpy(self.numpy)) is not None:
            states["numpy"] = numpy
        return states


class RandomSnapshot(NamedTuple):
    """The states of the random generators before a pass; `cuda` is None without a CUDA device."""

    host: HostStates
    cuda: bytes | None

    def to_plain(self) -> RandomStates:
        """Return the states as plain data, as they are written."""
        states = self.host.to_plain()
        if self.cuda is not None:
            states["torch"]["cuda"] = self.cuda
        return states


def read_host_states(cpu_state: Tensor | None = None) -> HostStates:
    """Read the states of the host's generators.

    cpu_state  that of torch's generator for the CPU, if it is known
    """
    numpy_random = sys.modules.get("numpy.random")
    return HostStates(
        python=_read_python_state(),
        numpy=None if numpy_random is None else _read_numpy_state(numpy_random),
        cpu=torch.default_generator.get_state() if cpu_state is None else cpu_state,
    )


class HostStateFollower:
    """Knows the states of the host's generators where a pass on a GPU begins, mostly without reading them there.

    To read the 5 kB of torch's takes 0.3 ms there (H200), while the device stands idle: the job has just let go of the
    graph of its last pass, and malloc first tidies up what was freed. So where the last NUM_QUIET forwards of a kind
    drew nothing, as a GPU's forward hardly ever does from these generators, the states are read where the pass ends
    alone. They are those of the beginning then, unless just this forward is the first of its kind to draw: what it drew
    is not known, and no end is recorded. If a state has changed since the end of the pass before, the next passes of
    all kinds are read at both ends again.
    """

    def __init__(self) -> None:
        # By the kind of pass.
        self._num_quiet: Counter[PassKind] = Counter()
        self._kind: PassKind = False, False
        self._may_wait = False
        self._at_begin: HostStates | None = None
        self._at_end: HostStates | None = None
        self._was_read = True

    def begin(self, kind: PassKind, *, may_wait: bool) -> HostStates:
        """Begin a pass. Returns the states that it begins with, as far as is known.

        may_wait  the pass is on a GPU, and `end` will be called unless it fails
        """
        self._kind, self._may_wait = kind, may_wait
        known = self._at_end if may_wait and self._num_quiet[kind] >= NUM_QUIET else None
        self._was_read = known is None
        self._at_begin = read_host_states() if known is None else known
        return self._at_begin

    def end(self, cpu_state: Tensor) -> HostStates | None:
        """End a pass. Returns the states that it began with, if `begin` has returned other ones.

        cpu_state  that of torch's generator for the CPU now
        """
        if not self._may_wait:
            return None
        states = read_host_states(cpu_state)
        is_same = self._at_begin is not None and states.equals(self._at_begin)
        if is_same:
            self._num_quiet[self._kind] += 1
        else:
            self._num_quiet.clear()
        self._at_begin, self._at_end = None, states
        return None if is_same or self._was_read else states


class _KnownState:
    """The latest state that was read of a generator, and the words and the position that the generator keeps in memory.

    A state has an object of each of 624 words: where the job's caches hold other things, to read it takes ten times as
    long as to look at both ends of these bytes. One end has the position, which each draw changes, and a generator that
    has gone through its words makes all of them anew, as seeds do. The view of the memory is made once: the first call
    of a function of ctypes after the job's own work takes 0.25 ms.
    """

    def __init__(self, generator: Any, address: int) -> None:
        # The generator is held, and its memory with it.
        self.generator = generator
        self.state: Any = None
        self._memory = memoryview((ctypes.c_ubyte * (4 * _NUM_WORDS)).from_address(address))
        self._begin, self._end = self._memory[:_NUM_END_BYTES], self._memory[-_NUM_END_BYTES:]
        self._known_ends = b"", b""

    def is_current(self) -> bool:
        """Tell whether `state` is that of the generator now."""
        begin, end = self._known_ends
        return self._begin.tobytes() == begin and self._end.tobytes() == end

    def remember(self, state: Any, words: bytes, *, has_gauss: bool) -> None:
        """Remember a state that was read.

        words      the bytes of its words and its position. Where the memory holds others, it is not the memory of such
                   a generator, or another thread has drawn meanwhile
        has_gauss  the state also holds the second of two normal numbers, which is drawn without a change of the words
        """
        self.state, self._known_ends = None, (b"", b"")
        if not has_gauss and self._memory.tobytes() == words:
            self.state, self._known_ends = state, (words[:_NUM_END_BYTES], words[-_NUM_END_BYTES:])


_known_python_state: _KnownState | None = None
_known_numpy_state: _KnownState | None = None


def _read_python_state() -> tuple[Any, ...]:
    """Read the state of Python's global generator."""
    global _known_python_state
    generator: Any = random._inst
    known = _known_python_state
    if known is not None and known.generator is generator and generator.gauss_next is None and known.is_current():
        return known.state  # type: ignore[no-any-return]
    state: tuple[Any, ...] = generator.getstate()
    _, words_and_position, gauss = state
    # CPython keeps the position and the words behind the head of the object.
    if known is None or known.generator is not generator:
        if _random.Random.__basicsize__ < object.__basicsize__ + 4 * _NUM_WORDS:
            return state
        known = _known_python_state = _KnownState(generator, id(generator) + object.__basicsize__)
    words = struct.pack(f"<{_NUM_WORDS}I", words_and_position[-1], *words_and_position[:-1])
    known.remember(state, words, has_gauss=gauss is not None)
    return state


def _read_numpy_state(numpy_random: Any) -> Mapping[str, Any] | None:
    """Read the state of NumPy's global generator; None if the job has put a generator of another kind there."""
    global _known_numpy_state
    # NumPy gives its generator away since 1.24.
    generator: Any = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
    known = _known_numpy_state
    if known is not None and known.generator is generator and known.is_current():
        return known.state  # type: ignore[no-any-return]
    state: Mapping[str, Any] = numpy_random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    if generator is not None:
        if known is None or known.generator is not generator:
            known = _known_numpy_state = _KnownState(generator, generator.ctypes.state_address)
        words = state["state"]["key"].tobytes() + struct.pack("<i", state["state"]["pos"])
        known.remember(state, words, has_gauss=bool(state["has_gauss"]))
    return state


def _make_plain_numpy(state: Mapping[str, Any] | None) -> NumpyState | None:
    """Turn a state of NumPy's generator into plain data."""
    if state is None:
        return None
    return {
        "algorithm": str(state["bit_generator"]),
        "keys": state["state"]["key"].tobytes(),
        "position": int(state["state"]["pos"]),
        "has_gauss": int(state["has_gauss"]),
        "gauss": float(state["gauss"]),
    }


def restore_random_states(states: RandomStates) -> None:
    """Set the generators of this process to the states before a captured pass; NumPy's if it is loaded.

    `states` are those of `CapturedCall.random`. Raises ValueError if they are damaged or missing.
    """
    try:
        python = states["python"]
        words = struct.unpack(f"<{_NUM_WORDS}I", python["state"])
        random.setstate((python["version"], words, python["gauss"]))
        torch.set_rng_state(_make_state(states["torch"]["cpu"]))
        if "cuda" in states["torch"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(_make_state(states["torch"]["cuda"]))
        numpy_random = sys.modules.get("numpy.random")
        if "numpy" in states and numpy_random is not None:
            state = states["numpy"]
            keys = sys.modules["numpy"].frombuffer(state["keys"], dtype="<u4")
            numpy_random.set_state((state["algorithm"], keys, state["position"], state["has_gauss"], state["gauss"]))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise ValueError(
            f"no random states: {error}. Record with reproduce=True or a flight recorder to have them"
        ) from None


def _make_state(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
