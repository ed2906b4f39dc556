"""What an older torch lacks is refused in one line."""

import pytest
import torch

from actor_init.backends.fsdp2 import check_streams
from actor_init.spec import UsageError


def test_a_cpu_without_the_streams_of_fsdp2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_streams(torch.device("cpu"))
    monkeypatch.delattr(torch.cpu.Stream, "record_event")
    with pytest.raises(UsageError, match=r"backend='fsdp2' on a CPU needs a later torch than .*Try: backend='ddp'"):
        check_streams(torch.device("cpu"))
    check_streams(torch.device("cuda"))
