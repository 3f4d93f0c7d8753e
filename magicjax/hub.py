"""Models of the Hugging Face Hub: downloads the files that `magicjax.load` reads, once.

They are in the cache of huggingface_hub, which transformers shares. Its environment variables apply
(HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE), it shows a progress bar, and an interrupted
download resumes.
"""

import contextlib
import functools
import pathlib
import re
import threading
from collections.abc import Iterator, Sequence

from models.huggingface import ADAPTER, weight_map

ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
# A file, or a quantization such as Q4_K_M, IQ4_XS, UD-Q4_K_XL or F16.
GGUF = re.compile(
    ID.pattern + r":([^:]+\.gguf|(UD-)?(I?Q\d|TQ\d|MXFP\d|NVFP\d|BF16|FP?16|FP?32)[\w-]*)",
    re.ASCII | re.IGNORECASE,
)
GGUF_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
SMALL = (
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja"),
    ADAPTER,
)
WEIGHTS = "model*.safetensors"  # and other files that the index names


def is_id(source: str) -> bool:
    """Returns whether a text has the form OWNER/NAME or OWNER/NAME@REVISION."""
    return ID.fullmatch(source) is not None


def is_gguf(source: str) -> bool:
    """Returns whether a text is OWNER/NAME:FILE.gguf or OWNER/NAME:QUANTIZATION.

    NAME may be NAME@REVISION.
    """
    return GGUF.fullmatch(source) is not None


@functools.cache
def snapshot(source: str, weights: bool) -> pathlib.Path:
    """Returns the directory of a model of the Hub; downloads what is missing or has changed.

    Args:
      source: OWNER/NAME, or OWNER/NAME@REVISION with a branch, a tag or a commit.
      weights: also download the weights.

    Raises:
      ValueError: there is no such revision, or the model is not in transformers' format.
      OSError: the model does not exist or is not public, or the Hub cannot be reached and the
        cache does not have all files.
    """
    name, _, revision = source.partition("@")
    directory = _download(name, revision, [*SMALL, WEIGHTS] if weights else [*SMALL])
    weight_files = {*weight_map(directory).values()} if weights else set()
    if others := sorted(file for file in weight_files if not (directory / file).is_file()):
        directory = _download(name, revision, others)
    has_config = (directory / "config.json").is_file()
    has_weights = not weights or weight_files or any(directory.glob(WEIGHTS))
    if (has_config and has_weights) or (directory / ADAPTER).is_file():
        return directory  # `models` says that an adapter is not a model
    missing = WEIGHTS if has_config else "config.json"
    if files := _gguf_files(name, revision)[0]:
        raise ValueError(
            f"{name} has no {missing}, but GGUF files: pass {source}:FILE, where FILE is "
            + _one_of(files)
        )
    if has_config:
        raise ValueError(
            f"{name} has no {WEIGHTS}: pass a revision with safetensors, such as "
            f"{name}@refs/pr/1, or convert its weights with save_pretrained of transformers"
        )
    raise ValueError(
        f"{name} has no config.json: pass a model in transformers' format or with GGUF files"
    )


@functools.cache
def gguf_file(source: str) -> pathlib.Path:
    """Returns the path of a GGUF file of the Hub; downloads it if it is missing or has changed.

    Args:
      source: OWNER/NAME:FILE.gguf, or OWNER/NAME:QUANTIZATION if one file has the quantization as a
        part of its name, in any case; NAME may be NAME@REVISION.

    Raises:
      ValueError: the revision or file does not exist, several files have the quantization, or the
        model is in several files.
      OSError: the model does not exist or is not public, or the Hub cannot be reached and the
        cache does not have the file.
    """
    import huggingface_hub

    repository, _, wanted = source.partition(":")
    name, _, revision = repository.partition("@")
    file = _matching_file(source, wanted, *_gguf_files(name, revision, source))
    with _clear_errors(source):
        return pathlib.Path(huggingface_hub.hf_hub_download(name, file, revision=revision or None))


def sha256(source: str, seconds: float) -> str | None:
    """Returns the SHA-256 of a GGUF file of the Hub without downloading it.

    Args:
      source: OWNER/NAME:FILE.gguf.
      seconds: the largest time to wait.

    Returns None if the file does not exist or the Hub does not answer in time.
    """
    import huggingface_hub

    name, _, file = source.partition(":")
    shas: list[str] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            info = huggingface_hub.HfApi().model_info(name, files_metadata=True, timeout=seconds)
            shas.extend(x.lfs.sha256 for x in info.siblings or () if x.rfilename == file and x.lfs)

    # The timeout of a request does not bound it: a connection tries several addresses.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return shas[0] if shas else None


def _gguf_files(name: str, revision: str, source: str = "") -> tuple[list[str], bool]:
    """Returns the GGUF files of a revision, and whether they are those in the cache only.

    Raises as `gguf_file`.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    version = revision or None
    with _clear_errors(source or name + f"@{revision}" * bool(revision)):
        try:
            info = huggingface_hub.HfApi().model_info(
                name, revision=version, timeout=constants.HF_HUB_ETAG_TIMEOUT
            )
            files, is_cached = [file.rfilename for file in info.siblings or ()], False
        except (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.HFValidationError,
        ):
            raise
        except Exception:  # of the HTTP client, whose type depends on the version
            folder = pathlib.Path(
                huggingface_hub.snapshot_download(
                    name, revision=version, allow_patterns=[], local_files_only=True
                )
            )
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
            is_cached = True
    return sorted(file for file in files if file.lower().endswith(".gguf")), is_cached


def _matching_file(source: str, wanted: str, files: Sequence[str], is_cached: bool) -> str:
    """Returns the file that a source wants; raises ValueError unless it is one."""
    from huggingface_hub import constants

    name = source.partition(":")[0]
    if wanted.lower().endswith(".gguf"):
        ggufs = [file for file in files if file == wanted]
    else:
        pattern = re.compile(rf"(^|[-./]){re.escape(wanted)}[-./]", re.IGNORECASE)
        # Files with mmproj in their names encode images.
        ggufs = [file for file in files if pattern.search(file) and "mmproj" not in file]
    if ggufs and all(GGUF_PART.search(file) for file in ggufs):
        raise ValueError(
            f"{source} is in several parts, {ggufs[0]} and others, and a single file is needed: "
            "download them, run llama-gguf-split --merge, and pass the path of its output"
        )
    if len(ggufs) == 1:
        return ggufs[0]
    where = ""
    if is_cached:
        where = f" in the cache of huggingface_hub, and {constants.ENDPOINT} cannot be reached"
    if not files:
        raise ValueError(
            f"{name} has no GGUF file{where}: pass {name} for its safetensors, or another model"
        )
    problem = f"{len(ggufs)} GGUF files" if ggufs else "no GGUF file"
    raise ValueError(
        f"{name} has {problem} of {wanted}{where}: pass {name}:FILE, where FILE is {_one_of(files)}"
    )


def _one_of(files: Sequence[str]) -> str:
    return "one of " * (len(files) > 1) + ", ".join(files)


def _download(name: str, revision: str, patterns: list[str]) -> pathlib.Path:
    """Returns the directory with the files of a revision, "" for the default one."""
    import huggingface_hub

    with _clear_errors(name + f"@{revision}" * bool(revision)):
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=patterns
        )
    return pathlib.Path(folder)


@contextlib.contextmanager
def _clear_errors(source: str) -> Iterator[None]:
    """Replaces the errors of huggingface_hub by built-in ones that say what to do."""
    from huggingface_hub import constants, errors

    name, _, revision = source.partition(":")[0].partition("@")
    endpoint = constants.ENDPOINT
    try:
        yield
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
