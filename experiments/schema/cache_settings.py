"""What a draft keeps of its context, as a cell of an experiment says it, and the drafter of that.

The library refuses what does not fit together; here its errors speak of an experiment's keys.
"""

import dataclasses
import hashlib
import inspect
import pathlib
import re
from typing import Any

import magicjax
from magicjax.drafters import Drafter
from magicjax.drafters.sparse import BUDGET
from magicjax.policies import Full, Policy, StreamingLLM, find

POLICY = {"self": "streaming", "small": "full"}  # of drafts with a cache, where none is given
SINKS = StreamingLLM().sinks


@dataclasses.dataclass(frozen=True)
class CacheSettings:
    """What a draft keeps, every setting resolved; by default nothing of its own.

    Attributes:
      policy: its name.
      kv_budget: slots for each layer and KV head; 0 of a full cache.
      sinks: the first tokens, which a streaming cache pins; 0 with other policies.
      recent: slots of the ring; 0: as many as the policy has by itself.
      refresh_every: after how many rounds the pins are chosen again; 0: never.
      kv_dtype: of the entries; "": the model's own.
      sink_positions: of a small model's sparse cache, else "".
    """

    policy: str = ""
    kv_budget: int = 0
    sinks: int = 0
    recent: int = 0
    refresh_every: int = 0
    kv_dtype: str = ""
    sink_positions: str = ""

    @property
    def label(self) -> str:
        """What tables say of it: `snapkv 256 refresh 4 int8`."""
        said = [
            self.policy,
            str(self.kv_budget or ""),
            f"sinks {self.sinks}" if self.sinks not in (0, SINKS) else "",
            f"recent {self.recent}" if self.recent else "",
            f"refresh {self.refresh_every}" if self.refresh_every else "",
            self.kv_dtype,
            "in cache" if self.sink_positions == "in_cache" else "",
        ]
        return " ".join(filter(None, said))

    @property
    def source(self) -> str:
        """A hash of the file with the policy's code, which may be another package's; "" if none."""
        if not self.policy:
            return ""
        code = pathlib.Path(inspect.getfile(type(find(self.policy)))).read_bytes()
        return hashlib.sha256(code).hexdigest()[:16]


def is_full(policy: str) -> bool:
    """Returns whether a draft with this policy keeps everything."""
    return isinstance(find(policy), Full)


def is_streaming(policy: str) -> bool:
    """Returns whether a draft with this policy pins the first tokens."""
    return isinstance(find(policy), StreamingLLM)


def check_used(policies: list[str], **given: Any) -> None:
    """Raises ValueError if a setting that was given would be ignored with all of the policies."""
    uses = {
        "sinks": (is_streaming, "policy=streaming"),
        "recent": (lambda p: not (is_streaming(p) or is_full(p)), "a policy that chooses its pins"),
        "sink_positions": (lambda p: not is_full(p), "policy=streaming"),
    }
    for name, value in given.items():
        used, remedy = uses[name]
        if value and not any(used(policy) for policy in policies):
            raise ValueError(
                f"{name} has no meaning with policy={', '.join(policies)}: remove it, or set "
                f"{remedy}"
            )


def resolve(draft: str, given: CacheSettings) -> CacheSettings:
    """Returns the settings of a draft, "self" or "small", with what was not given filled in.

    `sinks` and `recent` are dropped where the policy has no use for them: they may be meant for
    another policy of the same list.

    Raises:
      ValueError: they do not fit together; the message names the key.
    """
    full, streaming = is_full(given.policy), is_streaming(given.policy)
    settings = dataclasses.replace(
        given,
        kv_budget=given.kv_budget or (0 if full else BUDGET),
        sinks=(given.sinks or SINKS) if streaming else 0,
        recent=0 if full or streaming else given.recent,
        sink_positions=given.sink_positions or ("text" if draft == "small" and not full else ""),
    )
    try:
        drafter(draft, settings, model=None, draw=None)
    except ValueError as error:
        raise ValueError(in_words_of_keys(str(error))) from error
    return settings


def in_words_of_keys(message: str) -> str:
    """Returns an error of the library in an experiment's words: "kv_budget=8: ..."."""
    return re.sub(r"\bbudget(?==| out)", "kv_budget", message)


def drafter(draft: str, settings: CacheSettings, model: Any, draw: str | None) -> Drafter:
    """Returns the drafter, "self" or "small", that keeps what the settings say.

    Args:
      draft: which.
      settings: no policy means a full cache.
      model: of a small draft.
      draw: as for `magicjax.SmallModel`.
    """
    policy = _policy(settings)
    budget, kv_dtype = settings.kv_budget or None, settings.kv_dtype or None
    if draft == "self":
        every = settings.refresh_every or None
        return magicjax.SelfSpeculation(policy, budget, draw, every, kv_dtype)
    positions = settings.sink_positions or "text"
    return magicjax.SmallModel(model, draw, policy, budget, kv_dtype, positions)


def _policy(settings: CacheSettings) -> Policy:
    policy: Any = find(settings.policy or "full")
    changes = {name: getattr(settings, name) for name in ("sinks", "recent")}
    return dataclasses.replace(policy, **{name: n for name, n in changes.items() if n})
