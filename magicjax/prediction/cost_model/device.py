"""The rates of a device: its datasheet, and a few constants for the share that decoding reaches.

One set of constants serves all devices, but for the latency of an all-reduce and the bandwidth that
an A100 reaches, so that a device can be predicted from its datasheet and its link. Their sources:

- `bandwidth_efficiency` 0.90 and `matrix_efficiency` 0.80 were measured on an H200: a copy reached
  4.3 of 4.8 TB/s, and a product of 8192 x 8192 bfloat16 matrices 790 of 989 TFLOP/s.
- `layer_seconds`, `link_efficiency` and `round_seconds` are the rounded least-squares fit, by
  relative error, to the 12 rows of MagicDec's table 6 (T_target, T_verify, T_draft and the speedup
  on 8 H100). A layer of a draft step has 86 us of overhead: two all-reduces (`collective_seconds`,
  20 us each) and 46 us of kernel launches. All-reduces of 0.1 to 4 MB reach 0.31 of the link. A
  round has 0.86 ms of overhead (token selection and host; 0.56 to 1.01 ms in the single rows).
- `host_link_efficiency` 0.80: copies from pinned memory reach 25 of 32 GB/s on PCIe 4.0 and about
  52 of 64 GB/s on 5.0; not measured by this project.
- `collective_seconds` 20 us is typical for a small all-reduce within a node. The table determines
  only its sum with `layer_seconds`.
- A100: `bandwidth_efficiency` 0.83, because the authors of gpt-fast measured a peak of 1,700 of
  2,039 GB/s; `collective_seconds` 50 us, the rounded least-squares fit to the two times of plain
  decoding that MagicDec publishes for 8 of them. gpt-fast's times of plain decoding test both.
- L40 and other GPUs on PCIe: `collective_seconds` 126 us, from the one time of plain decoding that
  MagicDec publishes for 8 L40. A lower share of the bandwidth, 0.70, gives the same time, but makes
  the speedups on L40 8 to 22 % too high instead of 0 to 9 % too low.

Five constants thus come from 12 rows of one device and 3 of two others. MagicDec's table 1, to
which no number is fitted, is the test set (`python -m experiments.studies.cost_tables`). `magicjax
calibrate` fits all constants but those of links to the current device, with a model that is not
offloaded.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from types import MappingProxyType

from magicjax.prediction.cost_model.measured import Steps
from magicjax.suggest import did_you_mean

GB = 1e9
PCIE_COLLECTIVE = 126e-6  # seconds of an all-reduce without NVLink, fitted to 8 L40


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: rates of its datasheet, and the share of them that decoding reaches.

    Attributes:
      name: name of the preset or the hardware.
      bandwidth: bytes/s of its memory.
      matrix_rate: FLOP/s of dense matrix products in `dtype`.
      memory: bytes.
      link: bytes/s to other devices, each way; None if unknown, which excludes `model` > 1.
      host_link: bytes/s from host memory; None if unknown, which excludes offloading.
      overlaps_fetch: whether computation overlaps with copies from the host; False for a CPU.
      dtype: dtype of `matrix_rate`, and of the models that can be predicted.
      bandwidth_efficiency, matrix_efficiency, link_efficiency, host_link_efficiency: the shares
        that are reached, in (0, 1].
      collective_seconds: latency of an all-reduce.
      layer_seconds: overhead of a layer (kernel launches).
      round_seconds: overhead of a round, besides drafts and verification.
      tile: the FLOPs of a row's new tokens are rounded up to a multiple of this many tokens.
      measured: timed steps of models on this device.

    Raises:
      ValueError: a rate that is not positive, or an efficiency outside (0, 1].
    """

    name: str
    bandwidth: float
    matrix_rate: float
    memory: float
    link: float | None
    _: dataclasses.KW_ONLY
    host_link: float | None = None
    overlaps_fetch: bool = True
    dtype: str = "bfloat16"
    bandwidth_efficiency: float = 0.90
    matrix_efficiency: float = 0.80
    link_efficiency: float = 0.31
    host_link_efficiency: float = 0.80
    collective_seconds: float = 20e-6
    layer_seconds: float = 46e-6
    round_seconds: float = 0.86e-3
    tile: int = 1
    measured: tuple[Steps, ...] = ()

    def __post_init__(self):
        for name, value in vars(self).items():
            if name in ("name", "dtype", "overlaps_fetch", "measured"):
                continue
            if value is None and name in ("link", "host_link"):
                continue
            if name.endswith("_efficiency") and not 0 < value <= 1:
                raise ValueError(f"{name}={value} must be above 0 and at most 1")
            if name.endswith("_seconds") and not value >= 0:
                raise ValueError(f"{name}={value} must not be negative")
            if not name.endswith("_seconds") and not value > 0:
                raise ValueError(f"{name}={value} must be positive")

    def steps(self, model: str, kind: str) -> Steps | None:
        """Returns the timed steps of a model (`Sizes.key`), or None."""
        return next((s for s in self.measured if (s.model, s.kind) == (model, kind)), None)

    @property
    def reached_bandwidth(self) -> float:
        return self.bandwidth * self.bandwidth_efficiency

    @property
    def reached_matrix_rate(self) -> float:
        return self.matrix_rate * self.matrix_efficiency

    @property
    def reached_link(self) -> float:
        if self.link is None:  # nothing is sent: `Machine` checks that
            return math.inf
        return self.link * self.link_efficiency

    @property
    def reached_host_link(self) -> float:
        """Bytes/s from host memory.

        Raises:
          ValueError: it is unknown.
        """
        if self.host_link is None:
            raise ValueError(
                f"the host link of {self.name} is unknown, so an offloaded model cannot be "
                "predicted: calibrate the device again, or set host_link"
            )
        return self.host_link * self.host_link_efficiency


def _on_pcie(
    name: str,
    bandwidth: float,
    matrix_rate: float,
    memory: float,
    link: float,
    dtype: str = "bfloat16",
) -> Device:
    """Returns a device of which PCIe is the link to other devices and to the host."""
    return Device(
        *(name, bandwidth, matrix_rate, memory, link),
        host_link=link,
        dtype=dtype,
        collective_seconds=PCIE_COLLECTIVE,
    )


# Datasheets: memory bandwidth, dense bfloat16, memory, half of the bidirectional link, and PCIe x16
# to the host: 16 GB/s each way for version 3.0, 32 GB/s for 4.0, 64 GB/s for 5.0. The links of TPUs
# are those of a chip to all its neighbors; their link to the host is not published.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            # A100 80GB SXM: 2,039 GB/s, 312 TFLOP/s, NVLink 600 GB/s bidirectional.
            Device(
                *("a100", 2039 * GB, 312e12, 80 * GB, 300 * GB),
                host_link=32 * GB,
                bandwidth_efficiency=0.83,
                collective_seconds=50e-6,
            ),
            # H100 SXM5: 3.35 TB/s, 989 TFLOP/s without sparsity, NVLink 900 GB/s.
            Device("h100", 3350 * GB, 989e12, 80 * GB, 450 * GB, host_link=64 * GB),
            # H200 SXM: 4.8 TB/s, 141 GB, otherwise as H100.
            Device("h200", 4800 * GB, 989e12, 141 * GB, 450 * GB, host_link=64 * GB),
            # L40: 864 GB/s, 181 TFLOP/s without sparsity, PCIe 4.0 x16, 64 GB/s bidirectional.
            _on_pcie("l40", 864 * GB, 181e12, 48 * GB, 32 * GB),
            # L4: 300 GB/s, 121 TFLOP/s without sparsity, PCIe 4.0 x16.
            _on_pcie("l4", 300 * GB, 121e12, 24 * GB, 32 * GB),
            # A10: 600 GB/s, 125 TFLOP/s, PCIe 4.0 x16.
            _on_pcie("a10", 600 * GB, 125e12, 24 * GB, 32 * GB),
            # L40S: 864 GB/s, 362 TFLOP/s without sparsity, PCIe 4.0 x16.
            _on_pcie("l40s", 864 * GB, 362e12, 48 * GB, 32 * GB),
            # B200 SXM: 8 TB/s, 2,250 TFLOP/s without sparsity, 180 GB, NVLink 1.8 TB/s.
            Device("b200", 8000 * GB, 2250e12, 180 * GB, 900 * GB, host_link=64 * GB),
            # T4: 320 GB/s, 65 TFLOP/s of float16 (it has no bfloat16), PCIe 3.0 x16.
            _on_pcie("t4", 320 * GB, 65e12, 16 * GB, 16 * GB, "float16"),
            # TPU v5e: 819 GB/s, 197 TFLOP/s, 16 GB, 400 GB/s between chips.
            Device("v5e", 819 * GB, 197e12, 16 * GB, 200 * GB),
            # TPU v5p: 2,765 GB/s, 459 TFLOP/s, 95 GB, 1,200 GB/s between chips.
            Device("v5p", 2765 * GB, 459e12, 95 * GB, 600 * GB),
            # TPU v6e: 1,640 GB/s, 918 TFLOP/s, 32 GB, 800 GB/s between chips.
            Device("v6e", 1640 * GB, 918e12, 32 * GB, 400 * GB),
            # TPU7x, one of the two JAX devices of a chip: half of 7,370 GB/s, 2,307 TFLOP/s, 192 GB
            # and 1,200 GB/s between chips.
            Device("tpu7x", 3685 * GB, 1153e12, 96 * GB, 300 * GB),
        )
    }
)


def find_device(name: str) -> Device:
    """Returns the preset of that name, in upper or lower case.

    Raises:
      ValueError: an unknown name.
    """
    key = name.lower()
    if key not in DEVICES:
        raise ValueError(
            f"device {name!r} is unknown: use one of {', '.join(DEVICES)}, or a profile from "
            f"`magicjax calibrate`{did_you_mean(key, DEVICES)}"
        )
    return DEVICES[key]


def check_dtype(device: Device, dtype: str, source: str | os.PathLike) -> None:
    """Raises ValueError if the device's rates are for elements of another size than the dtype's.

    `source` is the profile or the preset of the device, for the error message.
    """
    if dtype[-2:] != device.dtype[-2:]:  # bits
        raise ValueError(
            f"the rates of {source} are for {device.dtype}, and dtype={dtype}: use "
            f"{device.dtype}, or measure the device with `magicjax calibrate --dtype {dtype}`"
        )


@dataclasses.dataclass(frozen=True)
class Machine:
    """A mesh of identical devices.

    Attributes:
      device: one of them.
      data: number of groups over which rows are divided.
      model: devices per group, over which heads, the MLP and the vocabulary are divided.

    Raises:
      ValueError: a size below 1, or a group of devices without a link.
    """

    device: Device
    data: int = 1
    model: int = 1

    def __post_init__(self):
        for name in ("data", "model"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.model > 1 and self.device.link is None:
            raise ValueError(
                f"model={self.model}: the link between devices of {self.device.name} is unknown, "
                "because a single device was measured; use model=1, and `data` for other devices"
            )

    @property
    def devices(self) -> int:
        return self.data * self.model

    def rows(self, batch: int) -> int:
        """Returns the number of rows of the largest group."""
        return -(-batch // self.data)
