"""torchmetrics of a run: joules per sample, overlap of the two devices, fidelity of the features.

Each is a pure function of plain numbers or tensors and a thin class around it that accumulates and synchronises:

>>> energy_per_sample({"node7/GPU-8f2c": 90.0, "node7/aries-0": 10.0}, samples=50)
2.0
>>> overlap_efficiency(step_s=0.050, train_s=0.048, npu_s=0.020)
0.96
"""

from lightning_npu.metrics.energy import EnergyPerSample as EnergyPerSample
from lightning_npu.metrics.energy import energy_per_sample as energy_per_sample
from lightning_npu.metrics.fidelity import FeatureFidelity as FeatureFidelity
from lightning_npu.metrics.fidelity import feature_fidelity as feature_fidelity
from lightning_npu.metrics.overlap import OverlapEfficiency as OverlapEfficiency
from lightning_npu.metrics.overlap import overlap_efficiency as overlap_efficiency
