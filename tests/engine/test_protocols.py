"""What stands behind a protocol has all that it asks for, asked in the same way."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from penteract.engine.comm import comm, distributed, fake
from penteract.engine.device import device
from penteract.engine.executor.allocator import Allocator, Arena, Fresh

BEHIND = {
    comm.Comm: (distributed.Gloo, distributed.Nccl, fake.FakeComm),
    device.Device: (device.Cpu, device.Cuda, device.FakeDevice),
    Allocator: (Arena, Fresh),
}


@pytest.mark.parametrize(("protocol", "one"), [(p, one) for p, several in BEHIND.items() for one in several])
def test_it_is_asked_alike(protocol: type, one: type) -> None:
    asked = {n: f for n, f in vars(protocol).items() if inspect.isfunction(f) and not n.startswith("_")}
    assert asked
    for name, method in asked.items():
        assert list(inspect.signature(getattr(one, name)).parameters) == list(inspect.signature(method).parameters)
    for name in inspect.get_annotations(protocol):
        assert hasattr(one, name) or name in one.__dataclass_fields__  # type: ignore[attr-defined]


def test_a_devices_type_is_asked_for_where_it_is_said() -> None:
    """What `device_of` names, and doctor, which shows it."""
    engine = Path(device.__file__).parents[1]
    asking = re.compile(r"\b(device|at|pick_device\(.*\))\.type\b")
    found = {str(file.relative_to(engine)) for file in engine.rglob("*.py") if asking.search(file.read_text())}
    named = set(re.findall(r"kernels/\w+\.py", device.device_of.__doc__ or ""))
    assert found == {"device/device.py", "doctor/probe/torch.py", *named}
