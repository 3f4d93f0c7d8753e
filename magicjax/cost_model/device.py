"""What a device can do: its datasheet, and a few constants that say how much of it is reached.

The constants are few and physical, one set for all devices, so that a device which nobody measured
can be foretold from its datasheet. How each was chosen:

- `bandwidth_efficiency` 0.90 and `matrix_efficiency` 0.80 were measured on an H200: a copy moved
  4.3 of 4.8 TB/s, and a product of 8192 x 8192 matrices in bfloat16 ran at 790 of 989 TFLOP/s.
- `layer_seconds`, `link_efficiency` and `round_seconds` are the least-squares fit, by relative
  error, of the 12 rows of MagicDec's table 6 (T_target, T_verify, T_draft and the speed-up on 8
  H100), rounded. What they mean: a layer of a draft step takes 86 us beside its bytes, two
  all-reduces (`collective_seconds`, 20 us each) and 46 us of starting kernels; all-reduces of 0.1
  to 4 MB, as decoding has, reach 0.31 of a link, by which steps grow with the batch; and a round
  takes 0.86 ms beside drafts and verification (choosing tokens, the host; by themselves the
  published rows say 0.56 to 1.01 ms).
- `host_link_efficiency` 0.80: copies from pinned memory reach 25 GB/s of PCIe 4.0's 32 and about 52
  of 5.0's 64; not measured by this project.
- `collective_seconds` 20 us is what a small all-reduce within a node is known to take. The table
  fixes only its sum with `layer_seconds`.

So three numbers come from 12 rows of one device, none from a single row, and none from MagicDec's
table 1, which tests them on other devices and fewer of them (`python -m
experiments.studies.cost_tables`).
`magicjax calibrate` fits them to the device at hand, all but those of links, from a model
that is on it and not offloaded.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from types import MappingProxyType

from magicjax.cost_model.measured import Steps

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Device:
    """One device: what its datasheet says, and how much of that decoding reaches.

    Attributes:
      name: as users write it.
      bandwidth: bytes a second, of its memory.
      matrix_rate: FLOP a second of matrix products in `dtype`, dense.
      memory: bytes.
      link: bytes a second to its neighbours, each way; None: not known, so it works alone.
      host_link: bytes a second from the host's memory; None: not known, so nothing is offloaded.
      fetches_beside: whether it computes while it fetches from there; a CPU does both itself.
      dtype: of `matrix_rate`; models in another dtype cannot be foretold.
      bandwidth_efficiency, matrix_efficiency, link_efficiency: the shares of them that are reached.
      collective_seconds: of an all-reduce of nothing.
      layer_seconds: of a layer beside its bytes and FLOPs: starting its kernels.
      round_seconds: of a round of speculation beside drafts and verification.
      tile: the new tokens of a row cost FLOPs in multiples of this many.
      measured: steps that were timed on it, each model's with one device.

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
    fetches_beside: bool = True
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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "dtype", "fetches_beside", "measured") or (
                field.name in ("link", "host_link") and value is None
            ):
                continue
            if field.name.endswith("_efficiency"):
                if not 0 < value <= 1:
                    raise ValueError(f"{field.name}={value} must lie above 0 and be at most 1")
            elif field.name.endswith("_seconds"):
                if not value >= 0:
                    raise ValueError(f"{field.name}={value} must not be negative")
            elif not value > 0:
                raise ValueError(f"{field.name}={value} must be positive")

    def steps(self, model: str, kind: str) -> Steps | None:
        """Returns what was timed of a model (`Sizes.key`); None: nothing."""
        found = (s for s in self.measured if (s.model, s.kind) == (model, kind))
        return next(found, None)

    @property
    def reached_bandwidth(self) -> float:
        return self.bandwidth * self.bandwidth_efficiency

    @property
    def reached_matrix_rate(self) -> float:
        return self.matrix_rate * self.matrix_efficiency

    @property
    def reached_link(self) -> float:
        if self.link is None:  # `Machine` has seen to it that nothing is sent
            return math.inf
        return self.link * self.link_efficiency

    @property
    def reached_host_link(self) -> float:
        """Bytes a second from the host's memory.

        Raises:
          ValueError: it is not known.
        """
        if self.host_link is None:
            raise ValueError(
                f"the link between {self.name} and its host is not known, so an offloaded model "
                "cannot be foretold: calibrate the device anew, or give host_link"
            )
        return self.host_link * self.host_link_efficiency


# NVIDIA's datasheets: memory bandwidth, dense bfloat16, memory, half of the link's two-way rate,
# and PCIe with 16 lanes to the host, 32 GB/s each way of version 4.0 and 64 GB/s of 5.0.
DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            # A100 80GB SXM: 2,039 GB/s, 312 TFLOP/s, NVLink 600 GB/s both ways together.
            Device("a100", 2039 * GB, 312e12, 80 * GB, 300 * GB, host_link=32 * GB),
            # H100 SXM5: 3.35 TB/s, 989 TFLOP/s without sparsity, NVLink 900 GB/s.
            Device("h100", 3350 * GB, 989e12, 80 * GB, 450 * GB, host_link=64 * GB),
            # H200 SXM: 4.8 TB/s, otherwise an H100 with 141 GB.
            Device("h200", 4800 * GB, 989e12, 141 * GB, 450 * GB, host_link=64 * GB),
            # L40: 864 GB/s, 181 TFLOP/s without sparsity, PCIe 4.0 x16, 64 GB/s both ways.
            Device("l40", 864 * GB, 181e12, 48 * GB, 32 * GB, host_link=32 * GB),
            # A10: 600 GB/s, 125 TFLOP/s, PCIe 4.0 x16.
            Device("a10", 600 * GB, 125e12, 24 * GB, 32 * GB, host_link=32 * GB),
        )
    }
)


def find_device(name: str) -> Device:
    """Returns the device of that name, upper or lower case.

    Raises ValueError for an unknown name, with the nearest one, if one is near.
    """
    key = name.lower()
    if key not in DEVICES:
        near = difflib.get_close_matches(key, DEVICES, 1)
        nearest = f"the nearest is {near[0]!r}; " if near else ""
        raise ValueError(
            f"device {name!r} does not exist: {nearest}all are {', '.join(DEVICES)}, or the file "
            "of a profile that `magicjax calibrate` wrote"
        )
    return DEVICES[key]


def check_dtype(device: Device, dtype: str) -> None:
    """Raises ValueError if the device's rates are not those of numbers as large as the dtype's."""
    if dtype[-2:] != device.dtype[-2:]:  # bits
        raise ValueError(
            f"the rates of {device.name} are those of {device.dtype}, and the models are in "
            f"{dtype}: use {device.dtype}, or measure the device with `magicjax calibrate --dtype "
            f"{dtype}`"
        )


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind as a mesh.

    Attributes:
      device: each of them.
      data: groups among which rows are divided.
      model: devices of a group, among which heads, the MLP and the vocabulary are divided.

    Raises:
      ValueError: no device, or a group of devices without a link.
    """

    device: Device
    data: int = 1
    model: int = 1

    def __post_init__(self):
        for name in ("data", "model"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} leaves no device: give at least 1")
        if self.model > 1 and self.device.link is None:
            raise ValueError(
                f"model={self.model}: the link between devices of {self.device.name} is not known, "
                "because it was measured alone; use model=1, and `data` for the other devices"
            )

    @property
    def devices(self) -> int:
        return self.data * self.model

    def rows(self, batch: int) -> int:
        """Returns the rows of the fullest group."""
        return -(-batch // self.data)
