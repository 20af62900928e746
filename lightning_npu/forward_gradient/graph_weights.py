"""``GraphWeights``: layers inside an INT8 artifact, trained as the integers that they are."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_npu.artifact import Artifact
from lightning_npu.errors import InputError
from lightning_npu.forward_gradient import graph_state
from lightning_npu.forward_gradient.integer_weights import IntegerParameter
from lightning_npu.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from lightning_npu.runtimes.onnx import OnnxRuntime


class GraphWeights(nn.Module):
    """An artifact that runs with weights of some layers from outside: integer parameters, no float weights at all.

    ::

        adapted = GraphWeights("encoder.npu", ["classifier.weight", "classifier.bias"])
        optimizer = ForwardGradient(
            adapted.parameters(), lr=3e-3, eps=2e-2, fixed_point=FixedPoint(weight_bits=8, rounding="error_feedback")
        )
        optimizer.step(lambda: cross_entropy(adapted(images), labels))
        adapted.save("adapted.npu")

    It is called as the module that was compiled, and returns what that returned, without gradients. Only ONNX Runtime
    takes weights as inputs; engines that compile weights in (qbruntime among them) cannot, and what is trained for them
    is what stands before the frozen module, by ``NPUFrozenModule(gradient="forward")``.

    Args:
        artifact: an artifact for target "onnx" with integer weights, or its path.
        layers: names of weights and biases as torch calls them; see :meth:`trainable`.
        weight_bits: 8: the integers as compiled, INT8 kernels. 16: the same values on a grid 256 times as fine (less
            ``headroom``), so the layer's product is computed in float32 of 16-bit weights and 8-bit activations.
            Biases stay in the accumulator's 32 bits in both. What was trained in 16 bits and saved goes on on the grid
            that it has, in 16 bits only.
        headroom: with 16 bits, bits above each channel's largest weight that are kept free.
        wide_outputs: an output that comes straight from one of the layers is not rounded to 8 bits; its range was
            calibrated with other weights.
        threads: of one call; default: half of the cores that this process may use.

    Raises:
        ArtifactError: the artifact is not for target "onnx", or damaged.
        InputError: a layer that is not there, or a wrong option.
    """

    def __init__(
        self,
        artifact: Artifact | str | Path,
        layers: Sequence[str] | str,
        *,
        weight_bits: int = 8,
        headroom: int = 1,
        wide_outputs: bool = True,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        from lightning_npu.forward_gradient import graph_layers  # reads ONNX, which is imported on use

        self.artifact = graph_layers.loaded(artifact)
        if weight_bits not in (8, 16):
            raise InputError("weight_bits is wrong.", expected="8 or 16", got=repr(weight_bits))
        if not isinstance(headroom, int) or isinstance(headroom, bool) or not 0 <= headroom <= 4:
            raise InputError("headroom is wrong.", expected="an integer from 0 to 4", got=repr(headroom))
        self.weight_bits, self.headroom, self.wide_outputs, self.threads = weight_bits, headroom, wide_outputs, threads
        self._layers = graph_layers.chosen(
            self.artifact, [layers] if isinstance(layers, str) else list(layers), weight_bits
        )
        for layer in self._layers:
            grid = layer.trained_grid(weight_bits, headroom)
            finer = round(float((layer.grid.scale / grid.scale).flatten()[0]))
            values = torch.from_numpy(layer.values) * finer
            owner, _, leaf = layer.name.rpartition(".")
            _submodule(self, owner).register_parameter(leaf, IntegerParameter(values.to(grid.dtype), grid))
        self._runtime: OnnxRuntime | None = None

    @staticmethod
    def trainable(artifact: Artifact | str | Path) -> Mapping[str, tuple[int, ...]]:
        """The weights and biases that can be trained, by torch's name, with their shapes in the graph.

        A name that the exporter did not keep is told from the layer's bias, or is the graph's own. Shapes may be
        transposed. A layer that the graph holds in another form than the FP32 reference, as it does a first convolution
        that was rearranged for blocks of pixels, is not among them: it could not be saved.
        """
        from lightning_npu.forward_gradient import graph_layers

        found = graph_layers.trainable(graph_layers.loaded(artifact))
        return {name: tuple(layer.values.shape) for name, layer in found.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the artifact with the weights as they are now.

        Args:
            *args: arguments of the module that was compiled.
            **kwargs: likewise.

        Returns:
            What that module returned, on the device of the first input.

        Raises:
            InputError: other arguments, shapes or dtypes than compiled for, or an input that requires grad.
        """
        tensors = self.artifact.signature.flatten(args, kwargs)
        for spec, tensor in zip(self.artifact.inputs, tensors, strict=True):
            spec.check(tensor)
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"Input '{spec.name}' requires grad, but GraphWeights has no backward pass: what lies before it "
                    "would silently not be trained.",
                    expected="inputs that do not require grad",
                    remedy="detach() the input, or train what lies before by ForwardGradient too; after saving, "
                    "NPUFrozenModule(gradient='forward') lets gradients through",
                )
            if spec.static_batch not in (None, spec.samples(tensor)):
                raise InputError(
                    f"Input '{spec.name}' has another number of samples than the artifact fixes.",
                    expected=spec.static_batch,
                    got=spec.samples(tensor),
                    remedy="feed whole batches, or compile with batch_size=None",
                )
        plain = [
            tensor.detach().to("cpu", spec.torch_dtype).contiguous()
            for spec, tensor in zip(self.artifact.inputs, tensors, strict=True)
        ]
        outputs = self._opened().run([*plain, *self._stored().values()])
        device = tensors[0].device if tensors else torch.device("cpu")
        return self.artifact.structure.build([*(output.to(device) for output in outputs), *tensors])

    def save(self, output: str | Path, *, overwrite: bool = False) -> Artifact:
        """Write the artifact with the trained weights inside, whole or not at all, under a new fingerprint.

        Its FP32 reference gets what the integers stand for, and its fidelity is measured again on the samples that the
        artifact carries. ``wide_outputs`` is kept.

        Raises:
            ArtifactError: ``output`` exists and is not to be overwritten, or cannot be written.
        """
        from lightning_npu.forward_gradient.graph_save import save

        stored = {name: tensor.numpy() for name, tensor in self._stored().items()}
        floats = {
            layer.name: parameter.grid.dequantize(parameter).numpy()
            for layer, parameter in zip(self._layers, self._integers(), strict=True)
        }
        return save(
            self.artifact, Path(output), self._layers, stored, floats,
            bits=self.weight_bits, headroom=self.headroom, wide_outputs=self.wide_outputs, overwrite=overwrite,
        )  # fmt: skip

    def close(self) -> None:
        """Free the session; the next call opens another."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and other processes open a session of their own."""
        return {**self.__dict__, "_runtime": None}

    def get_extra_state(self) -> dict[str, str]:
        """Hashes of the grids: integers mean nothing without."""
        return graph_state.fingerprints(self._by_name())

    def set_extra_state(self, state: dict[str, str]) -> None:
        """Nothing is to be set; see :meth:`_load_from_state_dict`, which compares."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Refuse integers that stand for something else here; keep parameters integer ones with ``assign=True`` too."""
        grids = state_dict.get(prefix + "_extra_state", {})
        graph_state.take(state_dict, prefix, self._by_name(), grids)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphWeights:
        copied = GraphWeights(
            self.artifact, [layer.name for layer in self._layers], weight_bits=self.weight_bits,
            headroom=self.headroom, wide_outputs=self.wide_outputs, threads=self.threads,
        )  # fmt: skip
        memo[id(self)] = copied
        copied.load_state_dict(self.state_dict())
        return copied.train(self.training)

    def _by_name(self) -> dict[str, IntegerParameter]:
        return {layer.name: p for layer, p in zip(self._layers, self._integers(), strict=True)}

    def _integers(self) -> list[IntegerParameter]:
        found = [self.get_parameter(layer.name) for layer in self._layers]
        return [parameter for parameter in found if isinstance(parameter, IntegerParameter)]

    def _stored(self) -> dict[str, Tensor]:
        """The integers as the graph takes them, by the layers' names."""
        stored = {}
        for layer, parameter in zip(self._layers, self._integers(), strict=True):
            value = parameter.detach().cpu()
            if layer.stored_dtype(self.weight_bits).kind == "u":
                value = (value.to(torch.int16) + layer.zero_point).to(torch.uint8)
            stored[layer.name] = value.as_subclass(Tensor).contiguous()
        return stored

    def _opened(self) -> OnnxRuntime:
        if self._runtime is None:
            from lightning_npu.forward_gradient import graph_edit, graph_layers
            from lightning_npu.runtimes.onnx import OnnxRuntime

            self.artifact.verify()
            model = graph_layers.graph_of(self.artifact)
            if self.wide_outputs:
                model = graph_edit.leave_outputs_wide(model, self._layers)
            model = graph_edit.with_inputs(model, self._layers, bits=self.weight_bits, headroom=self.headroom)
            specs = [
                TensorSpec(
                    layer.constant, tuple(layer.values.shape), str(layer.stored_dtype(self.weight_bits)), "", None
                )
                for layer in self._layers
            ]
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model.onnx"
                path.write_bytes(model.SerializeToString())
                self._runtime = OnnxRuntime(
                    path, [*self.artifact.inputs, *specs], self.artifact.outputs, threads=self.threads
                )
        return self._runtime


def _submodule(root: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, made where there is none, so that parameters are called as in the original."""
    for part in path.split(".") if path else []:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root
