"""``import lightning_npu`` costs almost nothing and touches no device, driver or optional package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("lightning", "pytorch_lightning", "onnx", "onnxruntime", "onnxscript", "wandb", "qbruntime", "pynvml", "torch")


def loaded_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_package_alone_loads_nothing_heavy() -> None:
    assert loaded_after("import lightning_npu; dir(lightning_npu)") == set()


@pytest.mark.parametrize("name", ["NPUFrozenModule", "Artifact", "InputError", "runtimes"])
def test_using_a_module_loads_torch_at_most(name: str) -> None:
    # torch imports pynvml where it is installed
    assert (
        loaded_after(f"import lightning_npu; lightning_npu.{name}")
        <= loaded_after("import torch")
        <= {"torch", "pynvml"}
    )


def test_asking_what_is_available_loads_no_runtime() -> None:
    assert "onnxruntime" not in loaded_after("import lightning_npu; lightning_npu.runtimes.available()")


def test_the_check_can_fail() -> None:
    assert "onnxruntime" in loaded_after("import lightning_npu, onnxruntime")


def test_every_public_name_resolves() -> None:
    import lightning_npu

    for name in lightning_npu.__all__:
        assert getattr(lightning_npu, name) is not None
    assert lightning_npu.__version__
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        lightning_npu.no_such_name  # noqa: B018


def test_no_public_name_is_hidden_by_a_module_of_the_same_name() -> None:
    """Importing a submodule binds its name in the package; a function of that name would be gone."""
    import lightning_npu

    modules = {path.stem for path in Path(lightning_npu.__file__).parent.iterdir()}
    assert not modules & set(lightning_npu._PUBLIC)
