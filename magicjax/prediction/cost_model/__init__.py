"""The cost of decoding: bytes and FLOPs of its parts, and the time they take on a device.

`work` counts the work of a pass from a config; `device` has the rates of devices, `measured` the
timed steps, `profile` the file with both for this device; `rounds` computes times.
"""

from magicjax.prediction.cost_model.device import DEVICES, Device, Machine, check_dtype, find_device
from magicjax.prediction.cost_model.measured import DRAFT, PASS, Steps
from magicjax.prediction.cost_model.profile import (
    default_profile,
    device_kind,
    device_of,
    load_profile,
    save_profile,
)
from magicjax.prediction.cost_model.rounds import (
    CHOICE,
    Draft,
    RoundCost,
    draft_step,
    plain_step,
    round_cost,
    seconds,
    sources,
)
from magicjax.prediction.cost_model.work import (
    Sizes,
    Work,
    check_heads,
    kv_shards,
    pass_parts,
    sizes_of,
)
