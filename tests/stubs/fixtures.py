"""Fixtures ``stub_nvml([StubBoard(), ...])``, ``stub_mbltml([...], form=...)``: a stub, until the test's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from . import BindingMissing, StubMbltml, StubNvml, compiler


@pytest.fixture
def stub_nvml() -> Iterator[Callable[..., StubNvml]]:
    if compiler() is None:
        pytest.skip("no C compiler to build the stub of libnvidia-ml.so.1 with")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(StubNvml(*args, **options))


@pytest.fixture
def stub_mbltml() -> Iterator[Callable[..., StubMbltml]]:
    if compiler() is None:
        pytest.skip("no C compiler to build the stub of libmbltml.so with")

    with ExitStack() as stack:

        def enter(*args: Any, **options: Any) -> StubMbltml:
            try:
                return stack.enter_context(StubMbltml(*args, **options))
            except BindingMissing as error:
                pytest.skip(str(error))

        yield enter
