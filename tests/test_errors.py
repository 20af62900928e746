"""Every error says what, expected, got and what to do, and survives a process boundary."""

from __future__ import annotations

import pickle

from lightning_npu import errors


def test_messages_have_all_four_parts() -> None:
    error = errors.InputError("The shape is wrong.", expected="[2]", got="[3]", remedy="reshape it")
    assert str(error) == "The shape is wrong.\n  Expected: [2]\n  Got: [3]\n  What to do: reshape it"
    assert isinstance(error, ValueError)


def test_errors_can_be_pickled() -> None:
    for kind in (errors.NPUError, errors.ArtifactError, errors.DeviceError, errors.FidelityError):
        twin = pickle.loads(pickle.dumps(kind("What.", expected=1, remedy="do")))
        assert type(twin) is kind
        assert str(twin) == "What.\n  Expected: 1\n  What to do: do"
