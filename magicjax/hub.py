"""Models of the Hugging Face Hub: downloads the files that `magicjax.load` reads, once.

They are in the cache of huggingface_hub, which transformers shares. Its environment variables apply
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE), it shows a progress bar, and an interrupted
download resumes.
"""

import functools
import pathlib
import re

ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
SMALL = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
WEIGHTS = "model*.safetensors"


def is_id(source: str) -> bool:
    """Returns whether a text has the form OWNER/NAME or OWNER/NAME@REVISION."""
    return ID.fullmatch(source) is not None


@functools.cache
def snapshot(source: str, weights: bool) -> pathlib.Path:
    """Returns the directory of a model of the Hub; downloads what is missing or has changed.

    Args:
      source: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit.
      weights: also download the weights.

    Raises:
      ValueError: there is no such revision, or the model is not in transformers' format.
      OSError: there is no such model, it is not public, or the Hub cannot be reached and the cache
        does not have all files.
    """
    name, _, revision = source.partition("@")
    directory = _download(name, revision, [*SMALL, WEIGHTS] if weights else [*SMALL])
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{name} has no config.json: pass a model in transformers' format, or download a GGUF "
            "file and pass its path"
        )
    if weights and not any(directory.glob(WEIGHTS)):
        raise ValueError(
            f"{name} has no {WEIGHTS}: pass a revision with safetensors, such as "
            f"{name}@refs/pr/1, or convert its weights with save_pretrained of transformers"
        )
    return directory


def _download(name: str, revision: str, patterns: list[str]) -> pathlib.Path:
    """Returns the directory with the files of a revision, "" for the default one."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    source, endpoint = name + f"@{revision}" * bool(revision), constants.ENDPOINT
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=patterns
        )
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{name} requires permission: accept its conditions on {endpoint}/{name}, and set "
            "HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{name} is neither a directory nor a model on {endpoint}: correct the name, or set "
            "HF_TOKEN for a private model"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{name} has no revision {revision!r}: use a branch, a tag or a commit of "
            f"{endpoint}/{name}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is not a directory, the cache of huggingface_hub does not have all of its "
            f"files, and {endpoint} cannot be reached: run `magicjax fetch {source}` with network "
            "access, or pass the path of a directory"
        ) from error
    except errors.HFValidationError:
        raise
    except Exception as error:  # of the HTTP client, whose type depends on the version
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OSError(
            f"the download of {source} failed ({reason}): repeat the command to resume"
        ) from error
    return pathlib.Path(folder)
