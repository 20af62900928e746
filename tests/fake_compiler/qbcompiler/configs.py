"""Configuration classes that refuse what they do not know, as the vendor's do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


class QBCompilerError(Exception):
    pass


@dataclass
class CalibrationConfig:
    method: int = 0
    output: int = 0
    mode: int = 0
    max_percentile: Any = None
    act_scale_min: float = 0.0005

    def __post_init__(self) -> None:
        if self.max_percentile is not None and set(self.max_percentile) - {"percentile", "topk_ratio"}:
            raise QBCompilerError(f"extra fields: {self.max_percentile}")


@dataclass
class PreprocessingConfig:
    apply: bool = False
    auto_convert_format: bool = False
    pipeline: list[Any] = field(default_factory=list)
    input_configs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for step in self.pipeline:
            if step["op"] == "normalize" and set(step) - {"op", "mean", "std", "scaleToUint8", "fuseIntoFirstLayer"}:
                raise QBCompilerError(f"extra fields: {step}")


@dataclass
class Uint8InputConfig:
    apply: bool = False
    inputs: list[str] = field(default_factory=list)


@dataclass
class _Activation:
    query: int = 8
    key: int = 8
    value: int = 8
    output: int = 16
    head: int = 8
    ffn: int = 16


@dataclass
class _Weight:
    query: int = 8
    key: int = 8
    value: int = 8
    output: int = 8
    head: int = 8
    ffn: int = 8


@dataclass
class _Transformer:
    activation: _Activation = field(default_factory=_Activation)
    weight: _Weight = field(default_factory=_Weight)


@dataclass
class _LayerOverrides:
    activation_16bits: list[str] = field(default_factory=list)
    weight_16bits: list[str] = field(default_factory=list)


class _TransformerType:
    Activation, Weight = _Activation, _Weight

    def __call__(self, **fields: Any) -> _Transformer:
        return _Transformer(**fields)


class BitConfig:
    Transformer = _TransformerType()
    LayerOverrides = _LayerOverrides

    def __init__(self, transformer: Any = None, layer_overrides: Any = None) -> None:
        self.transformer, self.layer_overrides = transformer or _Transformer(), layer_overrides or _LayerOverrides()

    def describe(self) -> dict[str, Any]:
        return {**asdict(self.transformer), **asdict(self.layer_overrides)}
