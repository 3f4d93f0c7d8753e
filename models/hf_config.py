"""Reads config.json in Hugging Face's format; `hf_config_writing` writes it.

Most keys are fields of `DecoderConfig`; `hf_config_parts` reads settings that several determine.

A key that Hugging Face's config class declares, or its model reads, is read here, known to have no
effect on inference, or has only supported values: others are errors, because ignoring them would
result in a model that is slightly wrong. Keys that Hugging Face does not know are ignored and
logged. The tests compare the lists of keys with the installed transformers.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping
from typing import Any

from models.decoder_config import DecoderConfig
from models.families import FAMILIES, TEXT_DECODERS, family_config
from models.hf_config_keys import (
    FIXED,
    TYPE_NAMES,
    ConfigReader,
    check_type,
    json_types,
    log_ignored,
)
from models.hf_config_parts import READERS, Settings

# Fields that have no default; those that depend on others have one in `family_config`.
REQUIRED = {
    field.name
    for field in dataclasses.fields(DecoderConfig)
    if field.default is dataclasses.MISSING
} - {"num_kv_heads", "head_dim"}
# Fields for which null is a value: there is none, or it follows from others.
OPTIONAL = {
    name
    for name, hint in typing.get_type_hints(DecoderConfig).items()
    if type(None) in typing.get_args(hint)
} | {"num_kv_heads", "head_dim", "intermediate_size"}
FIELD_TYPES = json_types(DecoderConfig)


def drafter_head(method: str) -> str:
    """Returns the error for a drafter that reads a target's hidden states and cannot run alone."""
    return (
        f"this is a drafter of kind {method}, which reads the hidden states of its target and is "
        "not supported: draft with a small model of the target's vocabulary (small:PATH), an "
        "EAGLE-3 head (eagle:PATH), self:streaming:256 or prompt-lookup:4"
    )


def _refuse_heads(raw: Mapping[str, Any]) -> None:
    names = " ".join(map(str, (raw.get("model_type"), *(raw.get("architectures") or ())))).lower()
    for method in ("eagle", "medusa", "mlp_speculator"):
        if method in names or f"{method}_num_heads" in raw:  # Medusa's config has no other sign
            raise ValueError(drafter_head(method))


def read_config(raw: Mapping[str, Any], file: str = "config.json") -> DecoderConfig:
    """Returns the config of a config.json's contents.

    Keys that Hugging Face does not read are ignored, with one line in the log of `hf_config_keys`,
    which names `file`.

    Raises ValueError for an unknown `model_type`, missing keys, unsupported values and inconsistent
    sizes.
    """
    _refuse_heads(raw)
    name: Any = raw.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type={name!r} is not supported: it must be one of "
            f"{', '.join(FAMILIES)}; docs/extending/model_family.md describes how to add a family"
        )
    family = FAMILIES[name]
    whole = family.architecture
    bare = whole.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Model"
    for architecture in raw.get("architectures") or ():
        if architecture.lower() not in (whole.lower(), bare.lower()):  # MPT has both cases
            raise ValueError(
                f"architectures names {architecture!r}: for model_type={name!r} it must be {whole}"
            )
    fixed = FIXED | dict(family.fixed)
    raw = _without_aliases(raw, family.aliases)
    reader = ConfigReader(raw, family.defaults, fixed, family.ignored, family.rope_kinds)
    reader.read.add("model_type")
    settings: Settings = {}
    for key in family.keys:
        fields = family.fields(key)
        needed = REQUIRED - {"intermediate_size"} if family.mlp_ratio else REQUIRED
        unset = False if family.defaults.get(key) is False else None  # null, as it is false too
        value = reader.need(key) if needed.intersection(fields) else reader.get(key, unset)
        if value is None and key in raw and fields[0] not in OPTIONAL:
            raise ValueError(
                f"{key} is null: it must be {TYPE_NAMES[FIELD_TYPES[fields[0]]]}; without the key "
                "the family's default is used"
            )
        if value is not None:
            check_type(key, value, FIELD_TYPES[fields[0]])
            settings |= dict.fromkeys(fields, value)
    for setting in family.parts:
        settings |= READERS[setting](reader, settings)
    keys = {field: key for key in family.keys for field in family.fields(key)}
    try:
        config = family_config(name, **settings)
    except ValueError as error:  # names fields
        named = re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), str(error))
        raise ValueError(named) from error
    reader.check_unread()
    if reader.unknown:
        log_ignored(file, tuple(reader.unknown))
    return config


def _without_aliases(raw: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings with each alias under the key that it stands for.

    Raises ValueError if both are there and differ.
    """
    settings = dict(raw)
    for alias, key in aliases.items():
        value = settings.pop(alias, None)
        if value is None:
            continue
        if settings.get(key) not in (None, value):
            raise ValueError(
                f"{key}={settings[key]!r} and {alias}={value!r} are one setting: keep one of them"
            )
        settings[key] = value
    return settings


def text_decoder(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the text decoder of a model that also reads images, or `raw`.

    `tie_word_embeddings` is that of the whole model, by default as the family's, whatever the text
    decoder's.

    Raises ValueError if there are none.
    """
    family = TEXT_DECODERS.get(raw.get("model_type") or "")
    if family is None:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") not in (family, None):
        raise ValueError(
            f"model_type={raw['model_type']!r} needs a text_config of model_type {family!r}: add it"
        )
    tied = raw.get("tie_word_embeddings", FAMILIES[family].defaults["tie_word_embeddings"])
    return {**text, "tie_word_embeddings": tied, "model_type": family}
