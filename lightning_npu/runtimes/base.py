"""What every runtime is, and how one is found: by name, through the entry-point group ``lightning_npu.runtimes``."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lightning_npu.errors import DeviceError, InputError, NPUError, RuntimeUnavailableError, one_line
from lightning_npu.plugins import Plugins

if TYPE_CHECKING:
    import torch

    from lightning_npu.artifact import Artifact
    from lightning_npu.power.base import PowerSource
    from lightning_npu.signature import CallSignature
    from lightning_npu.structure import Node
    from lightning_npu.tensor_spec import TensorSpec

log = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "lightning_npu.runtimes"


class Runtime(ABC):
    """Executes one artifact: CPU tensors in, CPU tensors out.

    A subclass names itself, says whether this machine can run it, opens an artifact, and runs one batch at a time
    per slot. It is registered by an entry point in the group ``lightning_npu.runtimes`` whose name is ``name``.

    Attributes:
        name: the name under which users choose it.
        targets: the artifact targets that it can execute.
        option_names: the options that :meth:`open` takes; None: :meth:`open` itself refuses what it does not know.
            One named "timeout_s" is given the worker's limit for a call unless the user chose it.
        slots: how many calls of :meth:`run` may be in flight at once.
        inputs: what it takes, in order.
        outputs: what it gives, in order.
        fingerprint: identity of what it computes; equal fingerprints give equal features.
        device: the device it runs on, in words for logs.
        host_threads: threads of this machine's processor that a call keeps busy; 0 for devices of their own.
        signature: how the module that it stands for is called; None: its inputs, by position.
        structure: what that module returns; None: the one output, or a tuple of all.
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[str, ...]]
    option_names: ClassVar[tuple[str, ...] | None] = None
    slots: int = 1
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fingerprint: str
    device: str
    host_threads: int = 0
    signature: CallSignature | None = None
    structure: Node | None = None

    @classmethod
    @abstractmethod
    def available(cls) -> str:
        """``"ok ..."`` when this machine can run it, else the reason why not and the remedy, in one sentence."""

    @classmethod
    @abstractmethod
    def open(cls, artifact: Artifact, *, device_index: int | None = None, **options: Any) -> Runtime:
        """Open ``artifact`` on this machine.

        Raises:
            RuntimeUnavailableError: the package, driver or device is not here.
            ArtifactError: the artifact is not for this runtime.
        """

    @classmethod
    def check_options(cls, device_index: int | None, options: Mapping[str, Any]) -> None:
        """Refuse what :meth:`open` would refuse, long before a device is opened; touches no driver.

        Here: options that are not among :attr:`option_names`. A runtime that looks at values too extends this.

        Raises:
            InputError: an option that does not exist or has a wrong value.
            RuntimeUnavailableError: a device that cannot be.
        """
        known = cls.option_names
        unknown = [] if known is None else sorted(set(options) - set(known))
        if unknown:
            raise InputError(
                f"Runtime '{cls.name}' has no such options.",
                expected=f"of {sorted(known)}" if known else "no options",
                got=unknown,
                remedy="check the spelling, or leave them out",
            )

    @abstractmethod
    def run(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run one batch.

        Args:
            inputs: contiguous CPU tensors that match :attr:`inputs` in count, order, dtype and shape.
            out: contiguous CPU tensors to write the outputs to, page-locked ones among them. A runtime that cannot
                write there returns others, and the caller copies.

        Returns:
            CPU tensors that match :attr:`outputs`: ``out``, or memory that no later call writes to.

        Raises:
            DeviceError: the device failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the device. May be called more than once; :meth:`run` afterwards raises ``DeviceError``."""

    def learn(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take :attr:`inputs`, :attr:`outputs`, signature and structure from a first call.

        Only for runtimes that do not know them from an artifact: those whose :attr:`inputs` are empty.
        """
        raise DeviceError(f"Runtime '{self.name}' does not say what its inputs are.", remedy="set Runtime.inputs")

    def power_sources(self) -> Sequence[PowerSource]:
        """Sensors of the boards that it keeps busy, for the energy meter. Makes no driver call; default: none known."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Facts for logs and reports: primitives only."""
        return {"runtime": self.name, "device": self.device, "slots": self.slots}

    def closed_error(self) -> DeviceError:
        """The error for a call after :meth:`close`."""
        return DeviceError(f"Runtime '{self.name}' was closed.", remedy="open the artifact again")


RUNTIMES: Plugins[Runtime] = Plugins(
    ENTRY_POINT_GROUP,
    Runtime,  # type: ignore[type-abstract]
    home="lightning_npu.runtimes",
    word="runtime",
    error=RuntimeUnavailableError,
    also="'auto' or ",
)


def runtime_class(name: str) -> type[Runtime]:
    """The runtime class registered as ``name``.

    Raises:
        RuntimeUnavailableError: nothing is registered by that name, or what is registered cannot be imported.
    """
    return RUNTIMES.find(name)


def available() -> Mapping[str, str]:
    """Every registered runtime's name, with ``"ok ..."`` or the reason why it cannot run here and the remedy."""
    answers: dict[str, str] = {}
    for name in RUNTIMES.names:
        try:
            answers[name] = runtime_class(name).available()
        except Exception as error:  # one broken runtime must not hide the others
            answers[name] = one_line(error)
    return answers


def check_choice(artifact: Artifact, name: str, device_index: int | None, options: Mapping[str, Any] | None) -> None:
    """Refuse a choice of runtime that cannot come to anything, without opening a device or importing its package.

    With "auto", options are fine if one of the runtimes that take the artifact's target takes them: which of them
    is available is seen on first use.

    Args:
        artifact: a loaded artifact.
        name: a registered runtime, or "auto".
        device_index: which device.
        options: the runtime's options; None stands for none.

    Raises:
        RuntimeUnavailableError: no runtime of that name is registered, or it cannot execute the artifact's target.
        InputError: an option that the runtime does not have or whose value is wrong.
    """
    given = _checked(name, device_index, options)
    if name != "auto":
        kind = runtime_class(name)
        _require_target(kind, artifact)
        kind.check_options(device_index, given)
        return
    first: NPUError | None = None
    for candidate in _candidates(artifact):
        try:
            kind = runtime_class(candidate)
        except RuntimeUnavailableError:  # whether another one can run it is seen on first use
            continue
        if artifact.target in kind.targets:
            try:
                return kind.check_options(device_index, given)
            except NPUError as error:
                first = first or error
    if first is not None:
        raise first


def open_runtime(
    artifact: Artifact,
    name: str = "auto",
    *,
    device_index: int | None = None,
    call_timeout_s: float | None = None,
    **options: Any,
) -> Runtime:
    """Open ``artifact`` with the runtime ``name``, after making sure that it still is what was loaded.

    Args:
        artifact: a loaded artifact.
        name: a registered runtime, or "auto": the first one that takes the artifact's target and is available,
            one of the same name as the target before others. Where another one takes over, one line in the log says
            so; options and device index that were meant for the first and that the other does not have are left out.
        device_index: which device, for runtimes that have several.
        call_timeout_s: seconds after which whoever calls the runtime gives it up, for those with an option
            "timeout_s".
        **options: passed to the runtime.

    Raises:
        RuntimeUnavailableError: no runtime for this artifact can run here; the message lists each with its reason.
        InputError: an option that the runtime does not have or whose value is wrong.
        ArtifactError: the artifact was replaced, moved or damaged since it was loaded.
    """
    _checked(name, device_index, options)
    if name != "auto":
        return _open(runtime_class(name), artifact, device_index, call_timeout_s, options)
    reasons: list[str] = []
    passed: list[type[Runtime]] = []
    for candidate in _candidates(artifact):
        try:
            kind = runtime_class(candidate)
        except RuntimeUnavailableError as error:
            reasons.append(f"{candidate}: {error.what}")
            continue
        if artifact.target not in kind.targets:
            continue
        answer = kind.available()
        if answer.startswith("ok"):
            mine, index = options, device_index
            if passed:
                mine = {key: value for key, value in options.items() if not _only_of(passed, kind, key)}
                index = None
                _say_once(artifact.fingerprint, str(artifact.path.name), kind.name, "; ".join(reasons))
            return _open(kind, artifact, index, call_timeout_s, mine)
        reasons.append(f"{candidate}: {answer}")
        passed.append(kind)
    raise RuntimeUnavailableError(
        f"No runtime on this machine can execute an artifact for target '{artifact.target}'.",
        got="; ".join(reasons) or f"no registered runtime takes this target; registered: {RUNTIMES.names}",
        remedy="install one of them, or compile the module for another target; `lightning-npu doctor` lists both",
    )


def _candidates(artifact: Artifact) -> list[str]:
    """All registered names, the one that is also the target's first."""
    return sorted(RUNTIMES.names, key=lambda known: (known != artifact.target, known))


def _only_of(passed: list[type[Runtime]], kind: type[Runtime], option: str) -> bool:
    """Whether an option was meant for a runtime that cannot run here."""
    return option not in (kind.option_names or ()) and any(option in (other.option_names or ()) for other in passed)


@functools.cache
def _say_once(fingerprint: str, artifact: str, runtime: str, reasons: str) -> None:
    log.warning("%s runs on runtime '%s', and results are that runtime's: %s", artifact, runtime, reasons)


def _open(
    kind: type[Runtime],
    artifact: Artifact,
    device_index: int | None,
    call_timeout_s: float | None,
    options: dict[str, Any],
) -> Runtime:
    _require_target(kind, artifact)
    if call_timeout_s is not None and "timeout_s" in (kind.option_names or ()):
        options = {"timeout_s": call_timeout_s, **options}
    kind.check_options(device_index, options)
    artifact.verify()
    return kind.open(artifact, device_index=device_index, **options)


def _require_target(kind: type[Runtime], artifact: Artifact) -> None:
    if artifact.target not in kind.targets:
        raise RuntimeUnavailableError(
            f"Runtime '{kind.name}' cannot execute an artifact for target '{artifact.target}'.",
            expected=f"a target of {list(kind.targets)}",
            got=artifact.target,
            remedy="compile the module for that target, or choose runtime='auto'",
        )


def _checked(name: object, device_index: object, options: object) -> Mapping[str, Any]:
    """The options as a mapping; refuses what no runtime could take."""
    if not isinstance(name, str):
        raise InputError(
            "The runtime is chosen by its name.",
            expected="'auto' or the name of a registered runtime",
            got=repr(name),
            remedy="for an open runtime without an artifact, use NPUFrozenModule.from_runtime(runtime)",
        )
    if device_index is not None and (not isinstance(device_index, int) or isinstance(device_index, bool)):
        raise InputError(
            "device_index is wrong.", expected="None or an integer from 0 on", got=repr(device_index),
            remedy="leave it out for the first device",
        )  # fmt: skip
    if isinstance(device_index, int) and device_index < 0:
        raise InputError(
            "device_index is negative.", expected="None or an integer from 0 on", got=device_index,
            remedy="leave it out for the first device",
        )  # fmt: skip
    given = {} if options is None else options
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise InputError(
            "runtime_options are wrong.",
            expected="options by name, such as {'threads': 2}",
            got=repr(given)[:200],
            remedy="pass a dict, or leave it out",
        )
    return given
