"""Drafters as users write them, in commands and in tables: self:streaming:256, look-up:4."""

import re
from collections.abc import Callable
from typing import Any

from magicjax.drafters.base import Drafter
from magicjax.drafters.prompt_lookup import LookUp
from magicjax.drafters.self_speculation import SelfSpeculation
from magicjax.drafters.small_model import SmallModel
from magicjax.policies import Full, StreamingLLM, find

DRAFTER = re.compile(
    r"(?P<kind>self|small:(?P<path>.+?))(:(?P<policy>[\w.-]+)(:(?P<budget>\d+))?)?"
    r"|(?P<look_up>look-up)(:(?P<ngram>\d+))?"
)
DRAFTERS = (
    "self:streaming:256 (policy and budget), small:PATH (a model directory or preset), "
    "small:PATH:streaming:256 or look-up:4 (how many of the newest tokens to look for)"
)

# Options of the draft's cache, and which drafters they are for.
CACHE = {
    "refresh_every": "self:POLICY, with another policy than streaming or full",
    "kv_dtype": "self:POLICY or small:PATH:POLICY, with another policy than full",
    "sink_positions": "small:PATH:streaming",
}


def parts(text: str) -> re.Match:
    """Returns the parts of a drafter's text: `path`, `policy`, `budget`, or `look_up`, `ngram`.

    Raises:
      ValueError: it is none, or no such policy.
    """
    match = DRAFTER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no drafter: write {DRAFTERS}")
    if match["policy"]:
        try:
            find(match["policy"])
        except ValueError as error:
            colon = f"; for a directory of that name write {text}:full" if match["path"] else ""
            raise ValueError(f"{error}{colon}") from error
    return match


def has_use(text: str, option: str) -> bool:
    """Returns whether a drafter is one of those that an option of `CACHE` is for."""
    match = parts(text)
    if match["look_up"]:
        return False
    policy = find(match["policy"] or ("full" if match["path"] else "streaming"))
    streams = isinstance(policy, StreamingLLM)
    return {
        "refresh_every": not match["path"] and not streams,
        "kv_dtype": True,
        "sink_positions": bool(match["path"]) and streams,
    }[option] and not isinstance(policy, Full)


def make_drafter(
    text: str,
    load: Callable[[str], Any],
    draw: str | None = None,
    **cache: Any,
) -> Drafter:
    """Returns the drafter written as self:snapkv:256, small:DIRECTORY:streaming:256 or look-up:4.

    Args:
      text: policy and budget may be left out. What stands behind the last colons of a small model
        is read as policy and budget if it can be: a directory of such a name needs a policy
        behind it, small:a:b:full.
      load: gives a small model.
      draw: how children are drawn under sampling (`DRAWINGS`); a look-up draws none.
      cache: options of `CACHE`; a drafter that has no use for one is made without it.

    Raises:
      ValueError, FileNotFoundError: none of them, no such policy, no such model, or options that
        do not fit together.
    """
    match = parts(text)
    if match["look_up"]:
        return LookUp(int(match["ngram"])) if match["ngram"] else LookUp()
    given = {name: value for name, value in cache.items() if value is not None}
    said: dict[str, Any] = {name: n for name, n in given.items() if has_use(text, name)}
    if match["policy"]:
        said["policy"] = match["policy"]
    if match["budget"]:
        said["budget"] = int(match["budget"])
    if match["path"]:
        return SmallModel(load(match["path"]), draw, **said)
    return SelfSpeculation(draw=draw, **said)
