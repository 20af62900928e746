"""What an ``NPUFrozenModule`` writes to checkpoints and how it reads them: identities, never weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from lightning_npu.errors import ArtifactError
from lightning_npu.hashing import digest, state_sha256, tensor_sha256

if TYPE_CHECKING:
    from lightning_npu.frozen import FrozenModule

EXTRA = "_extra_state"
_TAIL, _REFERENCE = "tail.", "reference."


def freeze(part: nn.Module | None) -> dict[str, str]:
    """Freeze a tail or reference and give the SHA-256 of each weight, taken before any change of precision."""
    if part is None:
        return {}
    for parameter in part.parameters():
        parameter.requires_grad = False
    part.eval()
    return state_sha256(part)


def extra_state(module: FrozenModule) -> dict[str, Any]:
    """The checkpoint entry: primitives, so that ``torch.load(weights_only=True)`` reads it."""
    return {
        "format": 1,
        "fingerprint": module.fingerprint,
        "artifact": module.artifact.path.name if module.artifact is not None else "",
        "tail_sha256": digest(module._tail_state) if module._tail_state else None,
    }


def compare(module: FrozenModule, state: Any) -> None:
    """Refuse a checkpoint that was trained with other features.

    Raises:
        ArtifactError: with both fingerprints.
    """
    if not isinstance(state, Mapping) or "fingerprint" not in state:
        raise ArtifactError(
            "The checkpoint's entry for an NPUFrozenModule is not one.",
            expected="a fingerprint",
            got=repr(state)[:80],
            remedy="load the checkpoint into the model that wrote it",
        )
    if state["fingerprint"] != module.fingerprint:
        refuse(
            f"{state['fingerprint']} ({state.get('artifact', '')})",
            f"{module.fingerprint} ({'' if module.artifact is None else module.artifact.path.name})",
            "The checkpoint was trained with features of another artifact.",
        )
    tail = digest(module._tail_state) if module._tail_state else None
    if state.get("tail_sha256") != tail:
        refuse(
            f"tail {state.get('tail_sha256')}",
            f"tail {tail}",
            "The checkpoint was trained with another tail behind the same artifact.",
        )


def refuse(expected: str, got: str, what: str) -> NoReturn:
    """Raise the error for two different fingerprints."""
    raise ArtifactError(
        what,
        expected=f"fingerprint {expected}",
        got=f"fingerprint {got}",
        remedy="use the artifact that the checkpoint names, or train again with this one",
    )


def drop_frozen(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Take tail and reference out of a state dict: they come from the user's module, a checkpoint keeps hashes."""
    for key in [key for key in state_dict if key.startswith((prefix + _TAIL, prefix + _REFERENCE))]:
        del state_dict[key]


def load(module: FrozenModule, state_dict: dict[str, Any], prefix: str) -> None:
    """Read this module's part of a state dict; strict loading works in every case that is right.

    A checkpoint of this artifact is compared by fingerprint. One from before the offload holds the original
    weights: they are compared with those that were compiled, and dropped. One that holds neither is accepted with
    a warning. Where the module has a tail, its weights stay as they are.

    Raises:
        ArtifactError: another fingerprint, or original weights that differ from the compiled ones.
    """
    mine = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    state = mine.pop(EXTRA, None)
    if state is not None:
        module.set_extra_state(state)
    originals = {name: value for name, value in mine.items() if isinstance(value, Tensor)}
    if originals:
        _compare_weights(module, originals)
    elif state is None:
        warnings.warn(
            f"The checkpoint says nothing about '{prefix.rstrip('.')}': it cannot be checked that it was trained "
            f"with the features of {module.fingerprint[:12]}.",
            stacklevel=2,
        )
    for part, place in ((module.tail, _TAIL), (module.reference, _REFERENCE)):
        if part is not None:  # so that strict loading finds what is not saved
            state_dict.update({prefix + place + name: tensor for name, tensor in part.state_dict().items()})


def _compare_weights(module: FrozenModule, originals: Mapping[str, Tensor]) -> None:
    compiled: Mapping[str, str] = {} if module.artifact is None else module.artifact.manifest["source"]["state"]
    known = {**module._tail_state, **compiled}
    foreign = sorted(set(originals) - set(known))
    if foreign:
        raise ArtifactError(
            "The checkpoint holds weights that are not those of the module that was offloaded.",
            expected=f"names such as {sorted(known)[:3]}",
            got=foreign[:5],
            remedy="load the checkpoint into the model that wrote it, then offload",
        )
    changed = sorted(name for name, tensor in originals.items() if tensor_sha256(tensor) != known[name])
    if changed:
        raise ArtifactError(
            "The checkpoint's weights differ from those that were compiled into the artifact.",
            expected=f"SHA-256 {known[changed[0]][:16]} for '{changed[0]}'",
            got=f"{tensor_sha256(originals[changed[0]])[:16]}; {len(changed)} of {len(originals)} tensors differ",
            remedy="load the checkpoint into the original model, then offload it again",
        )
