"""Tokenizers in directories of Hugging Face's format."""

import codecs
import functools
import json
import os
import pathlib
from typing import Any

from models.hf_tensors import check_not_pointer

JSON = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
OTHERS = (SETTINGS, "tokenizer.model", "merges.txt")  # of directories without `JSON`
# Settings of `JSON`'s tokenizer; those of the class that `SETTINGS` names are ignored.
PASSED = (
    "model_max_length",
    "model_input_names",
    "padding_side",
    "truncation_side",
    "split_special_tokens",
)


def load_tokenizer(path: str | os.PathLike) -> Any:
    """Returns the directory's transformers tokenizer, or None if there is none.

    Ids are those of tokenizer.json. The other files only name special tokens and have the chat
    template: the classes of transformers 5 that they name, or that belong to a `model_type`,
    replace the normalizer and the pre-tokenizer of tokenizer.json. A directory without
    tokenizer.json has the tokenizer that transformers' class converts from its files.

    Raises ValueError if its files are incomplete or damaged, and ImportError for a package that a
    conversion needs.
    """
    path = pathlib.Path(path)
    files = [path / name for name in (JSON, *OTHERS) if (path / name).is_file()]
    if not files:
        return None
    for file in files:
        check_not_pointer(file)
    # Without torch, transformers recommends installing it, but tokenizers do not need it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        if (path / JSON).is_file():
            return _read(path)
        import transformers  # imports the names of all models

        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except ImportError:
        raise  # names the package that this tokenizer needs
    except Exception as error:  # `tokenizers` raises no other type for a damaged file
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the tokenizer in {path} cannot be read ({reason}): replace tokenizer.json and "
            "tokenizer_config.json by the model's"
        ) from error


def _read(path: pathlib.Path) -> Any:
    """Returns the tokenizer of tokenizer.json, with the names and the template of other files."""
    import transformers  # takes half a second to import, and is needed only for text

    settings = _settings(path)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    if isinstance(extra, dict):
        settings, extra = settings | extra, extra.values()
    named = {key: x for key, x in settings.items() if key.endswith("_token")}
    make = functools.partial(
        transformers.PreTrainedTokenizerFast,
        **_source(path / JSON),
        chat_template=_chat_template(path, settings),
        extra_special_tokens=[_token(x, special=True) for x in extra],
        **{key: _token(x, special=True) for key, x in named.items() if _is_token(x)},
        **{key: settings[key] for key in PASSED if settings.get(key) is not None},
    )
    tokenizer, listed = make(), _added_tokens(path, settings)
    added = tokenizer.added_tokens_decoder
    if any(str(added.get(i)) != str(token) for i, token in listed.items()):
        tokenizer = make(added_tokens_decoder=_missing(path, listed))
    if not tokenizer.num_special_tokens_to_add():  # else tokenizer.json says which are added
        for key in ("add_bos_token", "add_eos_token"):
            if settings.get(key):
                setattr(tokenizer, key, True)
    return tokenizer


def _source(file: pathlib.Path) -> dict[str, Any]:
    """Returns the argument with tokenizer.json, which may begin with a byte order mark."""
    with file.open("rb") as stream:
        if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            return {"tokenizer_file": str(file)}
    return {"tokenizer_object": _backend(file)}


def _backend(file: pathlib.Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(file.read_text("utf-8-sig"))


def _json(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}


def _settings(path: pathlib.Path) -> dict[str, Any]:
    """Returns the contents of tokenizer_config.json.

    Those of transformers before 4.34 do not list added tokens, and special_tokens_map.json has
    precedence.
    """
    settings = _json(path / SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings |= _json(path / "special_tokens_map.json")
    return settings


def _added_tokens(path: pathlib.Path, settings: dict[str, Any]) -> dict[int, Any]:
    """Returns the tokens that other files than tokenizer.json add to a vocabulary, by their ids."""
    if "added_tokens_decoder" in settings:
        listed = settings["added_tokens_decoder"].items()
    else:
        tokens = _json(path / "added_tokens.json").items()
        listed = [(i, {"content": text, "normalized": False}) for text, i in tokens]
    return {int(i): _token(fields, special=False) for i, fields in listed}


def _missing(path: pathlib.Path, listed: dict[int, Any]) -> dict[int, Any]:
    """Returns the listed tokens that are no added tokens of tokenizer.json."""
    tokens = _backend(path / JSON).get_added_tokens_decoder()
    known = {token.content for token in tokens.values()}
    return {i: token for i, token in sorted(listed.items()) if token.content not in known}


def _is_token(value: Any) -> bool:
    """Returns whether a setting such as `bos_token` names a token; "" and null do not."""
    return bool(value) and isinstance(value, str | dict)


def _token(value: str | dict[str, Any], special: bool) -> Any:
    """Returns a token that a file gives as a text or with its flags; `special` is the default."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return value
    fields = {key: x for key, x in value.items() if key not in ("__type", "id")}
    return AddedToken(**{"special": special} | fields)


def _chat_template(path: pathlib.Path, settings: dict[str, Any]) -> Any:
    """Returns the chat template, or several by their names; None if there is none.

    Files have precedence over tokenizer_config.json.
    """
    named = (path / "additional_chat_templates").glob("*.jinja")
    files = {"default": path / "chat_template.jinja"} | {file.stem: file for file in named}
    texts = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    return texts["default"] if {*texts} == {"default"} else texts or settings.get("chat_template")
